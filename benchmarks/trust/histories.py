"""`run_history`: runs that save, are killed anywhere, find files broken, and begin again.

Each process of a history is a fork, killed for good at a random one of its calls on files. Before
and after it the folder is read independently of autopar: which checkpoints are whole, and of which
run and save they are.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.train.checkpoints.checkpointer import Checkpointer
from benchmarks.trust.child import Tell, in_child

STEPS = 8
PROCESSES = 4
CALLS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")
"""Audit events at which a process may be killed."""


@dataclass(frozen=True, order=True)
class Whole:
    """A whole checkpoint, in the order of age: by run, then by save.

    Attributes:
        run: place of the run among those of the folder.
        mark: number of the save among all of the history.
    """

    run: int
    mark: int
    step: int


@dataclass
class Marked:
    """A state that says which save it is of; the checkpoint's scheduler."""

    mark: int = 0

    def state_dict(self) -> dict[str, int]:
        return {"mark": self.mark}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.mark = state["mark"]


@dataclass(frozen=True)
class Process:
    """The work of one process of a history.

    Attributes:
        first: mark of its first save.
        resumes: whether it goes on with what it finds.
        steps: steps that it saves after.
        kill_at: number of the call on a file at which it is killed, 0 for never.
    """

    first: int
    keep: int
    resumes: bool
    steps: tuple[int, ...]
    kill_at: int

    @staticmethod
    def draw(draw: random.Random, first: int) -> Process:
        steps = tuple(draw.randrange(1, STEPS) for _ in range(draw.randrange(1, 4)))
        kill_at = draw.choice([0, draw.randrange(1, 150)])
        return Process(first, draw.randrange(1, 4), draw.random() < 0.7, steps, kill_at)

    def run(self, folder: Path, tell: Tell) -> None:
        """Tell the mark that is resumed, and each mark that is saved."""
        model, marked = nn.Linear(1, 1), Marked()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        saver = Checkpointer(folder, model, optimizer, scheduler=marked, keep=self.keep)
        if self.resumes:
            saver.resume()
            tell(("resumed", marked.mark))
        if self.kill_at:
            _kill_after(self.kill_at, str(folder))
        for number, step in enumerate(self.steps):
            marked.mark = self.first + number
            saver.save(step, wait=True)
            tell(("saved", marked.mark))


def _kill_after(count: int, folder: str) -> None:
    """Kill this process at a call on a file below a folder."""
    left = [count]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in CALLS and str(arguments[0]).startswith(folder):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def run_history(seed: str, folder: Path) -> list[str]:
    """Run one history in an empty folder; return what went wrong."""
    draw, faults = random.Random(seed), list[str]()
    for number in range(PROCESSES):
        _break(draw, folder)
        before = whole_in(folder)
        process = Process.draw(draw, 1 + number * 10)
        ended = in_child(lambda tell, it=process: it.run(folder, tell), 60.0)  # type: ignore[misc]
        after = whole_in(folder)
        faults += [f"process {number}: {fault}" for fault in _faults(process, before, after, ended)]
    return faults


def _faults(process: Process, before: list[Whole], after: list[Whole], ended: Any) -> Iterator[str]:
    told = dict(ended.told)
    if ended.hung or (ended.status and ended.status != -signal.SIGKILL):
        yield f"ended with {'no end' if ended.hung else ended.status}"
    newest = before[-1].mark if before else 0
    if process.resumes and told.get("resumed", 0) != newest:
        yield f"resumed {told.get('resumed')}, but {newest} is the newest whole one"
    saved = [mark for kind, mark in ended.told if kind == "saved"]
    left = {each.mark for each in after}
    if saved and not left & {saved[-1], saved[-1] + 1}:  # the next may have been killed late
        yield f"{saved[-1]} was saved last, and is gone"
    own_run = before[-1].run if process.resumes and before else None
    steps = set(process.steps[: len(saved) + 1])
    own = [each for each in before if each.run == own_run]
    if own and not any(each.run == own_run for each in after):
        yield f"no checkpoint of its run is left, of {[each.mark for each in own]}"
    for each in before:
        if each.run != own_run and each.step not in steps and each.mark not in left:
            yield f"{each.mark} of another run is gone"


def whole_in(folder: Path) -> list[Whole]:
    """The whole checkpoints in a folder, the oldest first."""
    found = {}
    for path in sorted(folder.glob("step-*"), reverse=True):  # step-N last, before N.replaced
        name = path.name.removesuffix(".replaced")
        if name.removeprefix("step-").isdigit() and (whole := _read(path, name)):
            found[name] = whole
    return sorted(found.values())


def _read(path: Path, name: str) -> Whole | None:
    try:
        sums = json.loads(_content(path / "checksums.json"))
        for file, (size, checksum) in sums.items():
            data = _content(path / file)
            if (len(data), zlib.crc32(data)) != (size, checksum):
                return None
        stamp = json.loads(_content(path / "run.json"))
        values = torch.load(path / "training.pt", weights_only=True)
    except (OSError, ValueError):
        return None
    return Whole(stamp["number"], values["scheduler"]["mark"], int(name.removeprefix("step-")))


def _content(file: Path) -> bytes:
    if not file.is_file():
        raise OSError("a pipe would wait")
    return file.read_bytes()


def _break(draw: random.Random, folder: Path) -> None:
    """Break files of checkpoints as disks, people and other programs do."""
    steps = sorted(folder.glob("step-*"))
    for path in draw.sample(steps, min(len(steps), draw.choice([0, 0, 1, 1, 2]))):
        files = sorted(each for each in path.iterdir() if each.is_file())
        if not files:
            continue
        file = draw.choice(files)
        match draw.choice(["cut", "flip", "remove", "pipe", "folder"]):
            case "cut":
                os.truncate(file, draw.randrange(1 + file.stat().st_size))
            case "flip" if data := bytearray(file.read_bytes()):
                data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
                file.write_bytes(data)
            case "remove":
                file.unlink()
            case "pipe":
                file.unlink()
                os.mkfifo(file)
            case "folder":
                shutil.rmtree(path)
