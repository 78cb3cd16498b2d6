"""`read_broken`: what reading does with a file that was broken at random."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import zlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from autopar.errors import AutoparError
from benchmarks.trust.child import Tell, in_child
from benchmarks.trust.mutations import NOBODY, mutate
from benchmarks.trust.samples import SAMPLES, LostError, Sample

LIMIT_S = 5.0
BAD = ("code", "raw", "hung", "lost")
OUTCOMES = ("read", "told", *BAD)
"""Read as if nothing was wrong; told by autopar; code run, another error, no end, or data lost."""

RUNS = ("os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "subprocess.Popen")
"""Audit events of a process that starts another."""


@dataclass(frozen=True)
class Case:
    """One broken file.

    Attributes:
        kind: name of the sample.
        how: the mutation.
        what: the error, in one line.
    """

    number: int
    kind: str
    file: str
    how: str
    outcome: str
    what: str


def read_broken(seed: int, number: int, folder: Path) -> Case:
    """Break a file of a good sample, and read it in a fork; `folder` is empty."""
    draw = random.Random(f"{seed} {number}")
    kind = draw.choice(sorted(SAMPLES))
    sample = SAMPLES[kind]
    shutil.copytree(_good(kind, folder.with_name("good")), folder, dirs_exist_ok=True)
    target = draw.choice(sorted(each for each in folder.glob(sample.targets) if each.is_file()))
    file = str(target.relative_to(folder))
    how = mutate(target, draw)
    if kind.startswith("forged"):
        _forge(target)
    before = _contents(folder, target)
    _open_to_all(folder)
    ended = in_child(lambda tell: _read(sample, folder, tell), LIMIT_S)
    if ended.hung:  # once more: the machine may have been busy
        ended = in_child(lambda tell: _read(sample, folder, tell), LIMIT_S)
    outcome, what = ended.told[-1] if ended.told else ("raw", f"ended with {ended.status}")
    if ended.hung:
        outcome, what = "hung", ""
    elif ("code", "") in ended.told:
        outcome = "code"
    target.parent.chmod(0o755)
    if _contents(folder, target) != before:
        outcome, what = "lost", "another file changed"
    return Case(number, kind, file, how, outcome, what)


@cache
def _good(kind: str, beside: Path) -> Path:
    """A folder with a good sample, which reads well."""
    folder = beside / kind.replace(" ", "-")
    folder.mkdir(parents=True)
    made = in_child(lambda tell: SAMPLES[kind].make(folder), 60.0)
    assert made.status == 0, f"{kind} cannot be made"
    read = in_child(lambda tell: SAMPLES[kind].read(folder), 60.0)
    assert read.status == 0, f"{kind} does not read its own sample"
    return folder


def _read(sample: Sample, folder: Path, tell: Tell) -> None:
    """Tell what came of reading, as a user without rights of their own."""
    if os.geteuid() == 0:
        os.setegid(NOBODY)
        os.seteuid(NOBODY)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in RUNS:
            tell(("code", ""))

    sys.addaudithook(hook)
    try:
        sample.read(folder)
        tell(("read", ""))
    except AutoparError as error:
        str(error).encode()  # may be printed
        tell(("told", _line(error)))
    except LostError as error:
        tell(("lost", _line(error)))
    except BaseException as error:
        tell(("raw", _line(error)))


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {ascii(str(error))[:200]}"


def _forge(target: Path) -> None:
    """Has the checksums of a checkpoint fit its changed file."""
    sums = target.parent / "checksums.json"
    is_plain = target.is_file() and not target.is_symlink()
    if target != sums and is_plain and target.stat().st_size < 1 << 28:
        try:
            data = target.read_bytes()
            document = json.loads(sums.read_text())
        except OSError:
            return
        document[target.name] = [len(data), zlib.crc32(data)]
        sums.write_text(json.dumps(document))


def _contents(folder: Path, target: Path) -> dict[str, int]:
    """Checksums of the regular files beside a broken one."""
    files = (each for each in folder.rglob("*") if not each.is_symlink() and each.is_file())
    return {str(each): zlib.crc32(each.read_bytes()) for each in files if each != target}


def _open_to_all(folder: Path) -> None:
    """Lets a user without rights read and write what is not closed on purpose."""
    for each in (folder, *folder.rglob("*")):
        if not each.is_symlink() and each.stat().st_mode & 0o700:
            each.chmod(each.stat().st_mode | 0o666 | (0o111 if each.is_dir() else 0))
