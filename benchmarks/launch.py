"""Starts the ranks of a benchmark with torchrun's environment, and watches over them.

One contender that crashes or hangs takes its processes with it: it is blamed, and the race is run
again without it.
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
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
AFTER_ERROR = 20  # seconds that ranks have to agree on an error before they count as hung

DYING = 40
"""Lines of what a rank that a signal ended had to say: its stack is among them."""


@dataclass(frozen=True)
class Job:
    """One race.

    Attributes:
        case: name of the model.
        world_size: number of processes.
        contenders: their names.
        rounds: timed steps of each contender.
        threads: intra-operator threads of each process.
        patience: seconds without progress after which a contender is given up.
    """

    case: str
    world_size: int
    contenders: tuple[str, ...]
    rounds: int
    threads: int
    patience: float

    def save(self, folder: Path) -> None:
        """Write the job where its ranks find it."""
        (folder / "job.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, folder: Path) -> Job:
        """Read what `save` wrote."""
        return cls(**json.loads((folder / "job.json").read_text()))


class Status(NamedTuple):
    """What rank 0 is doing, and for whom."""

    phase: str
    contender: str


@dataclass(frozen=True)
class Failure:
    """Why a race ended early, and who was running."""

    contender: str
    reason: str


def write_at_once(path: Path, text: str) -> None:
    """Write a file that nobody sees half written."""
    draft = path.with_name(f".{path.name}")
    draft.write_text(text)
    draft.replace(path)


Start = Callable[[Job, int, Path, int], subprocess.Popen[bytes]]
"""Starts a rank of a job whose folder and free port are given."""


def race(job: Job, tell: Callable[[str], None], start: Start | None = None) -> dict[str, Any]:
    """Run a job to its end, without those that brought it down; return the outcome.

    Ranks are processes beside this one, unless `start` starts them elsewhere.
    """
    lost: list[dict[str, str]] = []
    while True:
        with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder:
            result = _attempt(job, Path(folder), tell, start or _start)
        if isinstance(result, dict):
            result["contenders"] += lost
            return result
        if result.contender not in job.contenders:
            raise RuntimeError(f"{job.case} at world size {job.world_size}: {result.reason}")
        tell(f"{result.contender} brought the race down, again without it: {result.reason}")
        lost.append({"contender": result.contender, "error": result.reason})
        left = tuple(name for name in job.contenders if name != result.contender)
        job = replace(job, contenders=left)


def _attempt(
    job: Job, folder: Path, tell: Callable[[str], None], start: Start
) -> dict[str, Any] | Failure:
    job.save(folder)
    port = _port()
    processes = [start(job, rank, folder, port) for rank in range(job.world_size)]
    try:
        reason = _watch(processes, folder, job.patience, tell)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if reason is not None:
        return Failure(_status(folder).contender, reason)
    outcome: dict[str, Any] = json.loads((folder / "outcome.json").read_text())
    return outcome


def _port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


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
    with (folder / f"log.{rank}").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker", str(folder)],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _status(folder: Path) -> Status:
    path = folder / "status"
    return Status(*path.read_text().split("\t")) if path.exists() else Status("starting", "")


def _watch(
    processes: list[subprocess.Popen[bytes]],
    folder: Path,
    patience: float,
    tell: Callable[[str], None],
) -> str | None:
    """Return None when all ranks have ended well, else the reason why they have not."""
    status, since, failing_since = Status("", ""), time.monotonic(), math.inf
    while True:
        codes = [process.poll() for process in processes]
        if all(code == 0 for code in codes):
            return None
        error = next((path.read_text() for path in sorted(folder.glob("error.*"))), None)
        for rank, code in enumerate(codes):
            if code and code < 0:
                said = _tail(folder / f"log.{rank}", DYING)
                return f"rank {rank} died of {signal.Signals(-code).name}: {said}"
            if code:
                return error or f"rank {rank} ended: {_tail(folder / f'log.{rank}')}"
        now = time.monotonic()
        failing_since = min(failing_since, now) if error else math.inf
        if error and now - failing_since > AFTER_ERROR:
            return error
        if (new := _status(folder)) != status:
            if new.phase != status.phase or new.phase != "timing":
                tell(f"{new.phase} {new.contender}")
            status, since = new, now
        if now - since > patience:
            return f"no progress in {patience:.0f} s"
        time.sleep(0.2)


def _tail(path: Path, count: int = 1) -> str:
    """Return the last lines; the very last is that of an exception."""
    return "\n".join(path.read_text(errors="replace").strip().splitlines()[-count:]) or "no output"
