"""Faults, and the moment of a run at which one strikes: each strikes once, on one rank."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LAUNCHER = "FAULTS_LAUNCHER"  # environment variable: process of the launcher
PAUSE = "FAULTS_PAUSE"  # environment variable: seconds of a pause, a cut link or a full disk

PHASES = ("rendezvous", "planning", "load", "step", "save")


@dataclass(frozen=True)
class Injection:
    """One fault.

    Attributes:
        step: first step from which a fault in `step` or `save` strikes.
        delay: seconds after the phase has begun, at most until it ends.
    """

    id: int
    fault: str
    phase: str
    rank: int
    step: int
    delay: float


class Injector:
    """The next fault of a schedule, on this rank; events of all ranks go to one file."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self.rank = folder, rank
        self._attempt = os.environ["MASTER_PORT"]  # each attempt has a store of its own
        self._ranks = int(os.environ["WORLD_SIZE"])
        text = (folder / "schedule").read_text()
        self._schedule = [Injection(**each) for each in json.loads(text)]

    def _due(self) -> Injection | None:
        """Return the first fault that has not struck."""
        left = (e for e in self._schedule if not (self._folder / f"struck-{e.id}").exists())
        return next(left, None)

    def note(self, event: str, **values: Any) -> None:
        """Append an event to the log."""
        line = {"event": event, "rank": self.rank, "ranks": self._ranks, "time": time.time()}
        line["attempt"] = self._attempt
        with (self._folder / "events").open("a") as file:
            file.write(json.dumps(line | values) + "\n")

    @contextlib.contextmanager
    def during(self, phase: str, step: int = 0) -> Iterator[None]:
        """Let the next fault strike inside, if it is one of this phase and rank."""
        due = self._due()
        if due is None or (due.phase, due.rank) != (phase, self.rank) or step < due.step:
            yield
            return
        lock, struck = threading.Lock(), []

        def strike() -> None:
            with lock:
                if not struck:
                    struck.append(True)
                    self._strike(due)

        timer = threading.Timer(due.delay, strike)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            strike()  # the phase was shorter

    def _strike(self, due: Injection) -> None:
        (self._folder / f"struck-{due.id}").touch()
        self.note("fault", **{key: value for key, value in asdict(due).items() if key != "rank"})
        FAULTS[due.fault](self._folder)


def schedule(
    fault: str, phases: list[str], step: int, ranks: int, first: int, seed: int
) -> list[Injection]:
    """Faults that strike one after the other from a step on, at random moments on random ranks."""
    rng = random.Random(f"{fault} {phases} {seed}")
    made = []
    for number, phase in enumerate(phases, start=first):
        starting = phase in PHASES[:3]
        delay = rng.uniform(0, 0.4 if starting else 0.05)
        after = 0 if starting else step
        made.append(Injection(number, fault, phase, rng.randrange(ranks), after, delay))
    return made


def _kill(folder: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _terminate(folder: Path) -> None:
    os.kill(int(os.environ[LAUNCHER]), signal.SIGTERM)


def _later(command: str) -> None:
    """Run a command after the pause, in a process of its own."""
    subprocess.Popen(["sh", "-c", f"sleep {os.environ[PAUSE]}; {command}"], start_new_session=True)


def _pause(folder: Path) -> None:
    _later(f"kill -CONT {os.getpid()}")
    os.kill(os.getpid(), signal.SIGSTOP)


def _fill(folder: Path) -> None:
    filler = folder / "disk" / "filler"
    _later(f"rm {filler}")
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(1 << 16)):
            pass
        while file.write(b"0"):
            pass


def _corrupt(folder: Path) -> None:
    """Change a byte of the newest checkpoint, then die."""
    steps = (folder / "disk").glob("step-*[0-9]")
    newest = max(steps, key=lambda each: int(each.name[5:]), default=None)
    if newest is not None:
        data = max(newest.glob("*.distcp"), key=lambda each: each.stat().st_size)
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
    _kill(folder)


def _cut(folder: Path) -> None:
    _later("ip link set eth0 up")
    subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)


FAULTS: dict[str, Callable[[Path], None]] = {
    "kill": _kill,
    "sigterm": _terminate,
    "sigstop": _pause,
    "disk-full": _fill,
    "corrupted": _corrupt,
    "link-down": _cut,
}
"""Faults to inject. SIGTERM goes to the launcher, and a corrupted checkpoint comes with kill -9."""
