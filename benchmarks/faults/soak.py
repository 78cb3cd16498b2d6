"""`python -m benchmarks.faults.soak`: the example GPT for hours under kills and pauses.

Two ranks run under `autopar run --max-restarts`. At random moments a rank is killed, a rank or the
launcher is told to leave, or a rank pauses. One process trains beside them without interruption.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.faults import soak_train
from benchmarks.faults.runs import LEFT, TOLERANCE
from benchmarks.launch import write_atomically
from benchmarks.report import about

RANKS = 2
HUNG_S = 400.0  # seconds without an event, behind the end of a pause; imports take a while
FAULTS = ("kill", "terminate-rank", "terminate-launcher", "pause", "pause")
GAP_S, PAUSE_S = 3.0, (2.0, 30.0)  # least seconds between faults; of a pause


@dataclass
class Soak:
    """The run under faults, and what was seen of it.

    Attributes:
        struck: process ids of ranks whose attempt a fault has ended.
        quiet_since: time of the last event, launch or end of a pause.
    """

    folder: Path
    options: argparse.Namespace
    rng: random.Random
    launcher: subprocess.Popen[bytes] | None = None
    launches: int = 0
    hangs: int = 0
    attempts: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    struck: set[int] = field(default_factory=set)
    quiet_since: float = field(default_factory=time.time)
    exits: list[int] = field(default_factory=list)
    steps: list[tuple[int, float]] = field(default_factory=list)
    recoveries: list[float] = field(default_factory=list)
    lost_steps: int = 0
    _read: int = 0
    _last: int = 0
    _ended: float = 0.0
    _began: float = field(default_factory=time.time)

    def start(self) -> None:
        """Start the launcher, as a scheduler would."""
        script = [str(Path(soak_train.__file__)), "--nproc", str(RANKS), "--max-restarts", "9999"]
        own = ["--", str(self.folder), self.options.strategy, str(self.options.step)]
        with (self.folder / "launcher").open("ab") as log:
            command = [sys.executable, "-m", "autopar", "run", *script, *own]
            self.launcher = subprocess.Popen(command, stdout=log, stderr=log)
        self.launches += 1

    def ranks(self) -> list[int]:
        """Process ids of living ranks."""
        assert self.launcher is not None
        path = Path(f"/proc/{self.launcher.pid}/task/{self.launcher.pid}/children")
        children = [int(each) for each in _text(path).split()]
        return [e for e in children if "soak_train.py" in _text(Path(f"/proc/{e}/cmdline"))]

    def strike(self) -> None:
        """Have a random fault, at most one that ends each attempt."""
        found, fault = self.ranks(), self.rng.choice(FAULTS)
        if len(found) < RANKS or self.struck & set(found) or self.launcher is None:
            return
        victim = self.rng.choice(found)
        self.faults[fault] = self.faults.get(fault, 0) + 1
        if fault == "pause":
            self._pause(victim)
            return
        self.struck, self._ended = set(found), time.time()
        number = signal.SIGKILL if fault == "kill" else signal.SIGTERM
        os.kill(self.launcher.pid if fault == "terminate-launcher" else victim, number)

    def _pause(self, victim: int) -> None:
        os.kill(victim, signal.SIGSTOP)
        time.sleep(self.rng.uniform(*PAUSE_S))
        os.kill(victim, signal.SIGCONT)
        self.quiet_since = time.time()

    def watch(self) -> None:
        """Read new events; start the launcher again where it has left or hangs."""
        assert self.launcher is not None
        with (self.folder / "events").open() as file:
            file.seek(self._read)
            while (line := file.readline()).endswith("\n"):
                self._read += len(line)
                self._take(json.loads(line))
        if time.time() - self.quiet_since > HUNG_S:
            self.hangs += 1
            self.launcher.kill()
        status = self.launcher.poll()
        if status is not None:
            self.exits += [status] if status not in (LEFT, -signal.SIGTERM) else []
            self.quiet_since = time.time()
            self.start()

    def _take(self, event: dict[str, Any]) -> None:
        self.quiet_since = max(self.quiet_since, event["time"])
        if event["event"] == "start":
            self._began = event["time"]
            self.attempts += event["rank"] == 0
        elif event["event"] == "resumed" and event["rank"] == 0:
            self.lost_steps = max(self.lost_steps, self._last - event["step"])
        elif event["event"] == "step":
            self._last = event["step"]
            self.steps.append((event["step"], event["loss"]))
            if self._ended and event["pid"] not in self.struck:
                self.recoveries.append(event["time"] - self._ended)
                self._ended = 0.0

    def restarts(self) -> int:
        """Number of restarts by launchers."""
        return _text(self.folder / "launcher").count("; restart ")

    def minute(self, reference: soak_train.Reference) -> dict[str, Any]:
        """Return the figures since the last call."""
        assert self.launcher is not None
        steps, self.steps = self.steps, []
        reference.wanted = max((step for step, _ in steps), default=reference.wanted)
        while len(reference.losses) < reference.wanted:
            time.sleep(0.1)
        apart = [abs(loss / reference.losses[step - 1] - 1) for step, loss in steps]
        attempts = max(self.attempts, self.launches + self.restarts())  # some die unseen
        ended = self.hangs + sum(n for fault, n in self.faults.items() if fault != "pause")
        processes = [self.launcher.pid, *self.ranks()]
        return {
            "step": self._last,
            "loss": steps[-1][1] if steps else None,
            "difference": max(apart, default=None),
            "wrong": sum(each > TOLERANCE for each in apart),
            "resident_mb": [_resident_mb(each) for each in processes],
            "open_files": [_open_files(each) for each in processes],
            "attempt_s": round(time.time() - self._began),
            "faults": dict(self.faults),
            "launches": self.launches,
            "restarts": self.restarts(),
            "attempts": attempts,
            "burnt": max(0, attempts - 1 - ended),
            "hangs": self.hangs,
            "odd_exits": list(self.exits),
            "lost_steps": self.lost_steps,
            "recovery_s": {
                "median": round(statistics.median(self.recoveries or [0.0]), 1),
                "worst": round(max(self.recoveries, default=0.0), 1),
            },
        }


def _text(path: Path) -> str:
    """A file's text, empty where its process is gone."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _resident_mb(pid: int) -> int:
    pages = _text(Path(f"/proc/{pid}/statm")).split()
    return int(pages[1]) * os.sysconf("SC_PAGE_SIZE") >> 20 if pages else 0


def _open_files(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults.soak", description=__doc__)
    add = parser.add_argument
    add("--minutes", type=float, default=120.0, help="at least 2")
    add("--strategy", default="zero3")
    add("--step", type=float, default=0.25, help="least seconds of a step")
    add("--gap", type=float, default=100.0, help="most seconds between faults")
    add("--seed", type=int, default=0, help="of the faults")
    add("--json", type=Path, help="file of the results, written every minute")
    options = parser.parse_args()
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(LEFT))  # takes the launcher with it
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        minutes = soak(Path(name), options)
    last = minutes[-1]
    bad = sum(each["wrong"] for each in minutes), last["hangs"], last["burnt"], last["odd_exits"]
    print(f"wrong steps, hangs, burnt attempts, odd exits: {bad}")
    return int(any(bad))


def soak(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run for so many minutes under faults; return the figures of each."""
    (folder / "disk").mkdir()
    (folder / "schedule").write_text("[]")
    (folder / "events").touch()
    run, reference = Soak(folder, options, random.Random(options.seed)), soak_train.Reference()
    run.start()
    head, began, minutes = about(), time.time(), [dict[str, Any]()]
    due = began + run.rng.uniform(GAP_S, options.gap)
    try:
        while time.time() < began + 60 * options.minutes:
            time.sleep(0.2)
            run.watch()
            if time.time() > due:
                run.strike()
                due = time.time() + run.rng.uniform(GAP_S, options.gap)
            if time.time() > began + 60 * len(minutes):
                minutes.append({"minute": len(minutes), **run.minute(reference)})
                print(json.dumps(minutes[-1]), flush=True)
                if options.json:
                    text = json.dumps({**head, "minutes": minutes[1:]}, indent=1)
                    write_atomically(options.json, text + "\n")
    finally:
        assert run.launcher is not None
        run.launcher.kill()
        run.launcher.wait()
    return minutes[1:]


if __name__ == "__main__":
    raise SystemExit(main())
