"""Whether ranks that disagree are told: no silence, no abort, no hang, no late error.

    python -m benchmarks.disagreements --json FILE
    python -m benchmarks.disagreements --only SkipsBackward,NoSyncAlone --ranks 2

Each scenario of `tests/harness/disagreements.py` runs on real gloo ranks, in fresh processes, under
strategies drawn in turn. The last rank does something else than the others. The exit status is 1
if a scenario ends in anything but an error on every rank, or a legitimate one does not train.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import asdict, dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from autopar.errors import AutoparError
from autopar.runtime.agreement.channel import Channel
from benchmarks.report import machine, versions
from tests.harness.disagreements.loop import STRATEGIES, Loop
from tests.harness.disagreements.scenarios import Scenario, scenarios

TIMEOUT_S = 5.0
"""Of the process group."""

LATE_S = 5.0
"""Seconds after the timeout by which every rank must have raised."""

KILLED_S = 60.0
"""Seconds after which processes are killed."""


@dataclass(frozen=True)
class Ended:
    """How a rank ended.

    Attributes:
        how: "raised", "finished", "left", "abort" or "hang".
        error: class of what it raised.
        message: its first line.
        seconds: from when it began to wait, or to do what failed, to the end.
        ours: whether it raised an AutoparError.
    """

    how: str
    error: str = ""
    message: str = ""
    seconds: float = 0.0
    ours: bool = False


@dataclass(frozen=True)
class Case:
    """One scenario that was run."""

    scenario: str
    strategy: str
    ranks: int
    outcome: str
    ends: tuple[Ended, ...]


def rank_of(scenario: Scenario, rank: int, size: int, port: int, folder: str, pipe: Any) -> None:
    """One rank, in a process of its own."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo"}
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.path.join(folder, f"rank{rank}.txt"), os.O_WRONLY | os.O_CREAT), 2)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT_S))
    loop = scenario.loop(rank, size, folder)
    began = [time.monotonic()]
    for stage in ("begin_step", "forward", "backward", "clip", "update", "after", "end"):
        setattr(loop, stage, _marking(getattr(loop, stage), began))
    Channel.exchange = _marking(Channel.exchange, began)  # type: ignore[method-assign]
    try:
        losses = loop.run()
        ended = ("finished", "", json.dumps(losses), began[0], False)
    except BaseException as error:
        ours = isinstance(error, AutoparError)
        first = str(error).splitlines()[0] if str(error) else ""
        ended = ("raised", type(error).__name__, first, began[0], ours)
    pipe.send((*ended, time.monotonic()))
    pipe.close()
    os._exit(0)


def _marking(call: Any, began: list[float]) -> Any:
    """A function that notes when it was called last."""

    def marked(*args: Any, **kwargs: Any) -> Any:
        began[0] = time.monotonic()
        return call(*args, **kwargs)

    return marked


def perform(scenario: Scenario, size: int) -> Case:
    """Runs a scenario on so many ranks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("fork")  # torch is imported once
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = {}, []
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            given = scenario, rank, size, store.port, folder, theirs
            process = context.Process(target=rank_of, args=given)
            process.start()
            theirs.close()
            pipes[ours] = rank
            processes.append(process)
        said: dict[int, Any] = {}
        until = time.monotonic() + KILLED_S
        while pipes and (left := until - time.monotonic()) > 0:
            for pipe in connection.wait(list(pipes), timeout=left):
                rank = pipes.pop(pipe)  # type: ignore[arg-type]
                try:
                    said[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    said[rank] = None
        for process in processes:
            process.join(0.5 if len(said) == size else 0)
            if process.is_alive():
                process.kill()
                process.join()
        codes = [process.exitcode for process in processes]
    ends = tuple(_ended(said.get(rank, "hang"), codes[rank]) for rank in range(size))
    return Case(scenario.name, scenario.strategy, size, outcome_of(scenario.kind, ends), ends)


def _ended(said: Any, code: int | None) -> Ended:
    if said == "hang":
        return Ended("hang")
    if said is None:
        return Ended("left") if code == 0 else Ended("abort", message=f"exit code {code}")
    how, error, message, began, ours, at = said
    return Ended(how, error, message[:300], round(at - began, 2), ours)


def outcome_of(kind: type[Loop], ends: tuple[Ended, ...]) -> str:
    """One word for how a scenario ended."""
    hows = [end.how for end in ends]
    for bad in ("abort", "hang"):
        if bad in hows:
            return bad
    if kind.legitimate:
        return "trained" if set(hows) == {"finished"} else "refused"
    others, odd = ends[:-1], ends[-1]
    if not all(end.how == "raised" and end.ours for end in others):
        return "silent"
    if odd.how != "raised" and not kind.leaves:
        return "silent"
    late = any(end.how == "raised" and end.seconds > TIMEOUT_S + LATE_S for end in ends)
    return "late" if late else "told"


def parse_arguments() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.disagreements")
    parser.add_argument("--only", default="", help="names of scenarios, separated by commas")
    parser.add_argument("--strategies", type=int, default=1, help="a scenario is run under")
    parser.add_argument("--strategy", default="", choices=["", *STRATEGIES], help="only this one")
    parser.add_argument("--ranks", default="2,3", help="numbers of ranks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    return parser.parse_args()


def main() -> int:
    """Runs the scenarios and shows how they ended."""
    args, console = parse_arguments(), Console(width=150)
    os.environ["AUTOPAR_CACHE"] = tempfile.mkdtemp(prefix="autopar-disagreements-")
    chosen = scenarios(len(STRATEGIES) if args.strategy else args.strategies)
    if args.strategy:
        chosen = [s for s in chosen if s.strategy == args.strategy]
    if args.only:
        chosen = [s for s in chosen if s.name in args.only.split(",")]
    cases = []
    for scenario in chosen:
        for size in map(int, args.ranks.split(",")):
            case = perform(scenario, size)
            cases.append(case)
            odd = f"{case.ends[0].how} {case.ends[0].error} {case.ends[0].message}"
            slowest = max(end.seconds for end in case.ends)
            console.print(
                f"{case.outcome:8} {scenario.name:24} {scenario.strategy:20} {size} ranks "
                f"{slowest:5.1f} s  {odd[:100]}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
            sys.stdout.flush()
    counts = dict(Counter(case.outcome for case in cases))
    console.print(counts)
    if args.json:
        when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        document = {"machine": machine(), "versions": versions(), "date": when, "counts": counts}
        document |= {"timeout_s": TIMEOUT_S, "cases": [asdict(case) for case in cases]}
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    return int(bool(set(counts) - {"told", "trained"}))


if __name__ == "__main__":
    sys.exit(main())
