"""Starts and watches the ranks of a race, with torchrun's environment.

A contender that crashes or hangs takes its processes with it. The race then runs again without it.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

ERROR_TIMEOUT_S = 20  # seconds in which ranks must agree on an error before they count as hung
STACK_LINES = 40  # lines of the log of a rank that a signal ended; its stack is among them


@dataclass(frozen=True)
class Job:
    case: str  # name of the model
    world_size: int  # number of processes
    contenders: tuple[str, ...]  # names of contenders
    rounds: int  # timed steps of each contender
    threads: int  # intra-operator threads of each process
    patience: float  # seconds without progress after which a contender is given up


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that no reader finds it incomplete."""
    draft = path.with_name(f".{path.name}")
    draft.write_text(text)
    draft.replace(path)


Start = Callable[[Job, int, Path, int], "subprocess.Popen[bytes]"]
"""Starts a rank of a job, with its folder and a free port."""

Notify = Callable[[str], None]  # shows progress


def race(job: Job, notify: Notify, start: Start | None = None) -> dict[str, Any]:
    """Run a job to its end, without the contenders that bring it down; return the outcome.

    Ranks are processes of this machine, unless `start` starts them elsewhere.
    """
    lost: list[dict[str, str]] = []
    while True:
        with tempfile.TemporaryDirectory(prefix="benchmarks-") as name:
            folder = Path(name)
            reason = _attempt(job, folder, notify, start or _start)
            if reason is None:
                outcome: dict[str, Any] = json.loads((folder / "outcome.json").read_text())
                outcome["contenders"] += lost
                return outcome
            _, contender = _status(folder)
        if contender not in job.contenders:
            raise RuntimeError(f"{job.case} at world size {job.world_size}: {reason}")
        notify(f"{contender} brought the race down, again without it: {reason}")
        lost.append({"contender": contender, "error": reason})
        left = tuple(name for name in job.contenders if name != contender)
        job = replace(job, contenders=left)


def _attempt(job: Job, folder: Path, notify: Notify, start: Start) -> str | None:
    """Return None once all ranks have ended well, else the reason why they have not."""
    (folder / "job.json").write_text(json.dumps(asdict(job)))
    port = free_port()
    processes = [start(job, rank, folder, port) for rank in range(job.world_size)]
    try:
        return _watch(processes, folder, job.patience, notify)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _start(job: Job, rank: int, folder: Path, port: int) -> subprocess.Popen[bytes]:
    environment = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(job.world_size),
        "LOCAL_WORLD_SIZE": str(job.world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(job.threads),
        "DS_ACCELERATOR": "cpu",
        "PYTHONFAULTHANDLER": "1",
    }
    command = [sys.executable, "-m", "benchmarks.worker", str(folder)]
    with (folder / f"log.{rank}").open("wb") as log:
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
        )


def _status(folder: Path) -> tuple[str, str]:
    """Current phase and contender of rank 0."""
    path = folder / "status"
    phase, _, contender = (path.read_text() if path.exists() else "starting").partition("\t")
    return phase, contender


def _watch(
    processes: list[subprocess.Popen[bytes]], folder: Path, patience: float, notify: Notify
) -> str | None:
    status, since, failing_since = ("", ""), time.monotonic(), math.inf
    while True:
        codes = [process.poll() for process in processes]
        if all(code == 0 for code in codes):
            return None
        error = next((path.read_text() for path in sorted(folder.glob("error.*"))), None)
        for rank, code in enumerate(codes):
            if code and code < 0:
                stack = tail(folder / f"log.{rank}", STACK_LINES)
                return f"rank {rank} died of {signal.Signals(-code).name}: {stack}"
            if code:
                return error or f"rank {rank} ended: {tail(folder / f'log.{rank}')}"
        now = time.monotonic()
        failing_since = min(failing_since, now) if error else math.inf
        if error and now - failing_since > ERROR_TIMEOUT_S:
            return error
        if (new := _status(folder)) != status:
            if new[0] != status[0] or new[0] != "timing":
                notify(" ".join(new))
            status, since = new, now
        if now - since > patience:
            return f"no progress in {patience:.0f} s"
        time.sleep(0.2)


def tail(path: Path, count: int = 1) -> str:
    """Return the last lines; the very last is that of an exception."""
    return "\n".join(path.read_text(errors="replace").strip().splitlines()[-count:]) or "no output"
