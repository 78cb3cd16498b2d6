"""`CheckpointFolder`: checkpoints as folders, each whole or not there.

A checkpoint is written into `step-N.partial` and renamed to `step-N` when every file is on disk.
`checksums.json` names its files with their sizes in bytes and CRC-32; `run.json` is its `Stamp`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import socket
import stat
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from autopar.core.common.files import open_file, read_typed
from autopar.errors import CheckpointError
from autopar.train.checkpoints.torch_index import INDEX

CHECKSUMS = "checksums.json"
STAMP = "run.json"
LOCK = ".lock"
VALUES = "training.pt"
"""File of the step, schedules, random states and places in the data, written by rank 0."""

CHUNK = 1 << 22  # bytes read at once

FileSum = tuple[int, int]
"""Size in bytes and CRC-32 of a file."""


class Stamp(msgspec.Struct, frozen=True):
    """The run that wrote a checkpoint.

    Attributes:
        run: random text, the same for a run and its restarts; "" before runs were told apart.
        number: place of the run among those of the folder, from 1.
        save: place of the checkpoint among those of its run.
    """

    run: str
    number: int
    save: int


@dataclass(frozen=True)
class Saved:
    """A checkpoint in the folder, which may be broken."""

    step: int
    path: Path
    stamp: Stamp

    @property
    def age(self) -> tuple[int, int, int]:
        """The order in which checkpoints were written: by run, then within it."""
        return self.stamp.number, self.stamp.save, self.step


@dataclass(frozen=True)
class CheckpointFolder:
    """The folder of a run; `step-N` inside is the checkpoint after step N."""

    path: Path

    def saved(self) -> list[Saved]:
        """The checkpoints, the last written first."""
        steps: dict[int, Path] = {}
        for each in sorted(self._entries()):  # step-N comes before step-N.replaced
            if match := re.fullmatch(r"step-(\d+)(\.replaced)?", each.name):
                steps.setdefault(int(match[1]), each)
        saved = [Saved(step, path, _stamp(path, step)) for step, path in steps.items()]
        return sorted(saved, key=lambda each: each.age, reverse=True)

    def of_step(self, step: int) -> Path:
        """Folder of the checkpoint after a step."""
        return self.path / f"step-{step}"

    def partial_of(self, step: int) -> Path:
        """Folder that the checkpoint of a step is written into."""
        return self.path / f"step-{step}.partial"

    def lock(self, held: IO[str] | None = None) -> IO[str]:
        """A lock on the folder, which lasts until the file is closed or the process ends.

        `held` is the lock that this job has already; the folder may have been deleted since.
        Several Checkpointers of one process share the folder.

        Raises:
            CheckpointError: another job saves into the folder, or it cannot be locked.
        """
        file = held if held is not None and self._is_lock(held) else self._open_lock()
        owner = f"{socket.gethostname()} {os.getpid()}"
        try:
            # flock is of this open file: unlike a POSIX lock, no other reader of it can end it
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            file.seek(0)
            if file.read(len(owner) + 1) == owner:
                return file
            file.close()
            raise CheckpointError(
                f"another job saves into {self.path}: end it, or give this one another folder"
            ) from error
        except OSError:
            return file  # no locks on this file system: runs are told apart by their stamps alone
        file.seek(0)
        file.truncate()
        file.write(owner)
        file.flush()
        return file

    def _open_lock(self) -> IO[str]:
        path = self.path / LOCK
        flags = os.O_CREAT | os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(path, flags, 0o666)
        except OSError as error:
            raise CheckpointError(f"cannot lock {self.path}: {error}") from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise CheckpointError(f"cannot lock {self.path}: {path} is no regular file")
        return os.fdopen(descriptor, "r+")

    def _is_lock(self, file: IO[str]) -> bool:
        with contextlib.suppress(OSError):
            return os.path.samestat(os.fstat(file.fileno()), (self.path / LOCK).stat())
        return False

    def begin(self, step: int) -> Path:
        """An empty folder to write the checkpoint of a step into.

        Deletes what interrupted saves left: it takes the room of a checkpoint.
        """
        for each in self._entries():
            if re.fullmatch(r"step-\d+\.partial", each.name):
                _delete(each)
            elif re.fullmatch(r"step-\d+\.replaced", each.name):
                if each.with_suffix("").exists():
                    _delete(each)
                else:  # killed between the two renames of `publish`
                    each.rename(each.with_suffix(""))
        partial = self.partial_of(step)
        partial.mkdir(parents=True)
        return partial

    def publish(self, step: int, sums: Mapping[str, FileSum], stamp: Stamp) -> None:
        """Makes the checkpoint of a step visible; all its files have been written."""
        partial, whole = self.partial_of(step), self.of_step(step)
        (partial / STAMP).write_bytes(msgspec.json.encode(stamp))
        every = {**sums, STAMP: file_sum(partial / STAMP)}
        (partial / CHECKSUMS).write_text(json.dumps(every, indent=0))
        # A rename may reach the disk before the files do. A crash would then leave a checkpoint
        # under its final name with empty files.
        for name in (partial / STAMP, partial / CHECKSUMS, partial):
            _sync(name)
        replaced = self.path / f"step-{step}.replaced"
        if whole.exists():  # set aside until the new one has its name, so that one is always there
            whole.rename(replaced)
        partial.rename(whole)
        _sync(self.path)
        _delete(replaced)

    def prune(self, keep: int, run: str, broken: Collection[int]) -> None:
        """Deletes all but the last `keep` checkpoints of a run.

        Those of other runs stay, and those that are broken or short do not count.
        """
        of_run = [each for each in self.saved() if each.stamp.run == run]
        whole = [x for x in of_run if x.step not in broken and has_all_bytes(x.path)]
        for each in whole[keep:]:
            _delete(each.path)

    def _entries(self) -> list[Path]:
        with contextlib.suppress(FileNotFoundError):
            return list(self.path.iterdir())
        return []


def file_sum(path: Path) -> FileSum:
    """Size and CRC-32 of a regular file."""
    with open_file(path) as file:
        return os.fstat(file.fileno()).st_size, _checksum(file)


def _checksum(file: IO[bytes]) -> int:
    checksum = 0
    while chunk := file.read(CHUNK):
        checksum = zlib.crc32(chunk, checksum)
    return checksum


def sums_of(folder: Path, prefixes: Iterable[str]) -> dict[str, FileSum]:
    """Size and CRC-32 of the files of a folder whose name starts with one of these."""
    starts = tuple(prefixes)
    return {each.name: file_sum(each) for each in folder.iterdir() if each.name.startswith(starts)}


def has_all_bytes(folder: Path) -> bool:
    """Whether the files of a checkpoint have their sizes, without reading them."""
    try:
        sums = _read_sums(folder)
        return all((folder / name).lstat().st_size == size for name, (size, _) in sums.items())
    except (OSError, ValueError):
        return False


def faults_of(folder: Path, part: int, parts: int) -> list[str]:
    """Faults among every `parts`-th file of a checkpoint, from file number `part` on."""
    try:
        sums = _read_sums(folder)
    except (OSError, ValueError) as error:
        return [f"{CHECKSUMS} cannot be read ({type(error).__name__})"]
    faults = []
    for name in sorted(sums)[part::parts]:
        want, checksum = sums[name]
        try:
            with open_file(folder / name) as file:
                size = os.fstat(file.fileno()).st_size
                if size != want:  # perhaps without end
                    faults.append(f"{name} has {size} bytes instead of {want}")
                elif _checksum(file) != checksum:
                    faults.append(f"{name} has changed since it was written")
        except OSError as error:
            faults.append(f"{name} cannot be read ({error.strerror})")
    return faults


def _read_sums(folder: Path) -> dict[str, FileSum]:
    """The sums of a checkpoint by name; raises OSError or ValueError."""
    sums = read_typed(folder / CHECKSUMS, dict[str, FileSum])
    for name in sums:
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise ValueError(f"{name!r} is no name of a file")
    if not sums.keys() >= {INDEX, VALUES}:
        raise ValueError(f"{INDEX} and {VALUES} have no sums")
    return sums


def _stamp(folder: Path, step: int) -> Stamp:
    """The stamp of a checkpoint; that of a nameless first run where there is none."""
    with contextlib.suppress(OSError, ValueError):
        return read_typed(folder / STAMP, Stamp)
    return Stamp("", 0, step)


def _delete(path: Path) -> None:
    """Deletes a folder, or whatever has its name."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
