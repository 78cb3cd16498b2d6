"""`CheckpointFolder`: checkpoints of one run as folders, each whole or not there.

A checkpoint is written into `step-N.partial` and renamed to `step-N` when every file is on disk.
`checksums.json` names its files with their sizes in bytes and CRC-32.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

CHECKSUMS = "checksums.json"
CHUNK = 1 << 22  # bytes read at once

FileSum = tuple[int, int]
"""Size in bytes and CRC-32 of a file."""


@dataclass(frozen=True)
class CheckpointFolder:
    """The folder of a run; `step-N` inside is the checkpoint after step N."""

    path: Path

    def steps(self) -> list[int]:
        """Steps of the checkpoints, the newest first."""
        found = (re.fullmatch(r"step-(\d+)", each.name) for each in self._entries())
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def of_step(self, step: int) -> Path:
        """Folder of the checkpoint after a step."""
        return self.path / f"step-{step}"

    def partial_of(self, step: int) -> Path:
        """Folder that the checkpoint of a step is written into."""
        return self.path / f"step-{step}.partial"

    def begin(self, step: int) -> Path:
        """An empty folder to write the checkpoint of a step into.

        Deletes what interrupted saves left: it takes the room of a checkpoint.
        """
        for each in self._entries():
            if re.fullmatch(r"step-\d+\.partial", each.name):
                shutil.rmtree(each, ignore_errors=True)
        partial = self.partial_of(step)
        partial.mkdir(parents=True)
        return partial

    def publish(self, step: int, sums: Mapping[str, FileSum]) -> None:
        """Makes the checkpoint of a step visible; all its files have been written."""
        partial, whole = self.partial_of(step), self.of_step(step)
        (partial / CHECKSUMS).write_text(json.dumps(dict(sums), indent=0))
        for name in (partial / CHECKSUMS, partial):
            _sync(name)
        shutil.rmtree(whole, ignore_errors=True)
        partial.rename(whole)
        _sync(self.path)

    def prune(self, keep: int) -> None:
        """Deletes all but the newest `keep` checkpoints."""
        for step in self.steps()[keep:]:
            shutil.rmtree(self.of_step(step), ignore_errors=True)

    def _entries(self) -> list[Path]:
        with contextlib.suppress(FileNotFoundError):
            return list(self.path.iterdir())
        return []


def file_sum(path: Path) -> FileSum:
    """Size and CRC-32 of a file."""
    size = checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
    return size, checksum


def sums_of(folder: Path, prefixes: Iterable[str]) -> dict[str, FileSum]:
    """Size and CRC-32 of the files of a folder whose name starts with one of these."""
    starts = tuple(prefixes)
    return {each.name: file_sum(each) for each in folder.iterdir() if each.name.startswith(starts)}


def faults_of(folder: Path, part: int, parts: int) -> list[str]:
    """Faults among every `parts`-th file of a checkpoint, from file number `part` on."""
    try:
        sums = json.loads((folder / CHECKSUMS).read_text())
        names = sorted(sums)
    except (OSError, ValueError, TypeError) as error:
        return [f"{CHECKSUMS} cannot be read ({type(error).__name__})"]
    faults = []
    for name in names[part::parts]:
        try:
            size, checksum = file_sum(folder / name)
        except OSError as error:
            faults.append(f"{name} cannot be read ({error.strerror})")
            continue
        if size != sums[name][0]:
            faults.append(f"{name} has {size} bytes instead of {sums[name][0]}")
        elif checksum != sums[name][1]:
            faults.append(f"{name} has changed since it was written")
    return faults


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
