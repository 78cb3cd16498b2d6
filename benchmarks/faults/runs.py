"""`Run`: a run under `autopar run`, started again as a scheduler would, and its verdict."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from autopar.train.elastic.run import Launch
from autopar.train.elastic.run import run as launch
from benchmarks.faults.injection import LAUNCHER, PAUSE, Injection
from benchmarks.faults.train import EVERY
from benchmarks.faults.warm import NAMESPACE, STUB, die_with_parent, enter_namespace

TRAIN = Path(__file__).with_name("train.py")
TOLERANCE = 1e-5  # relative difference of losses from those of an uninterrupted run
LEFT = 143
DISK = "8m"  # size of the file system of checkpoints
ENDS_ATTEMPT = ("kill", "sigterm", "corrupted", "link-down")


@dataclass(frozen=True)
class Node:
    """A launcher: its number of ranks, and its network namespace, "" for this machine's."""

    ranks: int
    namespace: str = ""


@dataclass
class Run:
    """One run in a folder of its own.

    Attributes:
        nodes: least and largest number of launchers.
        limit_s: seconds without an end after which the run counts as hung.
        silence_s: seconds after which a silent launcher counts as gone.
    """

    folder: Path
    strategy: str
    pause_s: float
    limit_s: float
    nodes: tuple[int, int] = (1, 1)
    endpoint: str = ""
    silence_s: int = 5
    launches: int = 0
    launchers: dict[int, int] = field(default_factory=dict)

    def __enter__(self) -> Run:
        disk = self.folder / "disk"
        disk.mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", disk], check=True)
        self.schedule([])
        return self

    def __exit__(self, *error: object) -> None:
        for pid in list(self.launchers.values()):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        subprocess.run(["umount", "--lazy", self.folder / "disk"], check=True)

    def schedule(self, injections: Sequence[Injection]) -> None:
        """Replace the faults to come."""
        (self.folder / "schedule").write_text(json.dumps([asdict(each) for each in injections]))

    def start(self, number: int, node: Node, total: int) -> None:
        """Start a launcher, which trains until step `total`."""
        pid = os.fork()
        if pid:
            self.launchers[number] = pid
            return
        status = 1
        try:
            die_with_parent()
            log = (self.folder / f"launcher-{number}").open("ab", buffering=0)
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1)
            if node.namespace:
                enter_namespace(node.namespace)
            status = launch(self._launch(number, node, total))
        finally:
            os._exit(status)

    def _launch(self, number: int, node: Node, total: int) -> Launch:
        os.environ |= {
            LAUNCHER: str(os.getpid()),
            PAUSE: str(self.pause_s),
            NAMESPACE: node.namespace,
            "GLOO_SOCKET_IFNAME": "eth0" if node.namespace else "lo",
        }
        command = [str(STUB), str(TRAIN), str(self.folder), self.strategy, str(total)]
        logs = self.folder / f"logs-{number}"
        return Launch(
            command,
            node.ranks,
            self.nodes,
            self.endpoint,
            max_restarts=99,
            log_dir=logs,
            grace_s=60,
            silence_s=self.silence_s,
        )

    def wait(self, number: int) -> int | None:
        """Return the exit status of a launcher, or None where it has hung and was killed."""
        pid, deadline = self.launchers[number], time.monotonic() + self.limit_s
        while time.monotonic() < deadline:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self.launchers[number]
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
        return None

    def until_done(self, nodes: Sequence[Node], total: int) -> str:
        """Run launchers until their ranks are done; return what went wrong, or nothing."""
        while True:
            self.launches += 1
            for number, node in enumerate(nodes):
                self.start(number, node, total)
            statuses = {self.wait(number) for number in range(len(nodes))}
            if None in statuses:
                return "hung"
            if not statuses & {LEFT, -signal.SIGTERM}:
                return "" if statuses == {0} else f"exit statuses {statuses}"

    def events(self) -> list[dict[str, Any]]:
        with contextlib.suppress(FileNotFoundError):
            return [json.loads(line) for line in (self.folder / "events").read_text().splitlines()]
        return []


def wrong_losses(events: Sequence[Mapping[str, Any]], losses: Sequence[float]) -> list[int]:
    """Return the steps with another loss than that of an uninterrupted run."""
    return [
        each["step"]
        for each in events
        if each["event"] == "step" and abs(each["loss"] / losses[each["step"] - 1] - 1) > TOLERANCE
    ]


def burnt(events: Sequence[Mapping[str, Any]], launches: int) -> int:
    """Return the number of attempts that ended though no fault had struck."""
    attempts = {each["attempt"] for each in events if each["event"] == "start"}
    faults = [each for each in events if each["event"] == "fault"]
    ending = sum(each["fault"] in ENDS_ATTEMPT for each in faults)
    return max(0, len(attempts) - launches - ending)


def effects(events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the seconds from each fault to the next good step, and the steps that it cost."""
    found, ordered = [], sorted(events, key=lambda each: each["time"])
    for fault in (each for each in ordered if each["event"] == "fault"):
        ends = fault["fault"] in ENDS_ATTEMPT
        before = [e["step"] for e in ordered if e["event"] == "step" and e["time"] <= fault["time"]]
        after = [
            each
            for each in ordered
            if each["time"] > fault["time"] and (not ends or each["attempt"] != fault["attempt"])
        ]
        good = next((each for each in after if each["event"] == "step"), None)
        resumed = next((each["step"] for each in after if each["event"] == "resumed"), None)
        lost = max(before, default=0) - resumed if ends and resumed is not None else 0
        found.append(
            {
                "fault": fault["fault"],
                "phase": fault["phase"],
                "seconds": good and round(good["time"] - fault["time"], 2),
                "lost_steps": max(0, lost),
            }
        )
    return found


def allowed_loss(fault: str) -> int:
    """Return the steps that a fault may cost: an interval, two where it took a checkpoint."""
    return EVERY * (2 if fault == "corrupted" else 1)
