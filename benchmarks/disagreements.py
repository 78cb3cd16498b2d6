"""Errors on ranks that disagree: none may be missing or late, and no rank may abort or hang.

    python -m benchmarks.disagreements --only SkipsBackward,NoSyncAlone --ranks 2

Each scenario of `tests/harness/disagreements/` runs on gloo ranks in fresh processes, under
strategies chosen in turn. The last rank differs from the others.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import asdict, dataclass, replace
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from autopar.errors import AutoparError
from autopar.runtime.agreement.channel import Channel
from benchmarks.report import about, save
from tests.harness.disagreements.loop import STRATEGIES, Loop
from tests.harness.disagreements.scenarios import Scenario, scenarios

TIMEOUT_S = 5.0  # timeout of the process group
LATE_S = 5.0  # seconds after the timeout within which every rank must raise
KILLED_S = 60.0  # seconds after which processes are killed


@dataclass(frozen=True)
class RankEnd:
    """The end of one rank."""

    state: str  # "raised", "finished", "left", "abort" or "hang"
    error: str = ""  # class of its exception
    message: str = ""  # first line of its exception
    seconds: float = 0.0  # time from the last operation it began to its end
    is_autopar_error: bool = False  # whether it raised an AutoparError


@dataclass(frozen=True)
class Case:
    scenario: str
    strategy: str
    ranks: int
    outcome: str
    ends: tuple[RankEnd, ...]


def run_rank(scenario: Scenario, rank: int, size: int, port: int, folder: str, pipe: Any) -> None:
    """Run one rank, in a process of its own."""
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
        setattr(loop, stage, _timed(getattr(loop, stage), began))
    Channel.exchange = _timed(Channel.exchange, began)  # type: ignore[method-assign]
    try:
        end = RankEnd("finished", message=json.dumps(loop.run())[:300])
    except BaseException as error:
        first = (str(error).splitlines() or [""])[0][:300]
        ours = isinstance(error, AutoparError)
        end = RankEnd("raised", type(error).__name__, first, is_autopar_error=ours)
    pipe.send(replace(end, seconds=round(time.monotonic() - began[0], 2)))
    pipe.close()
    os._exit(0)


def _timed(call: Any, began: list[float]) -> Any:
    """Return the function, which now records the time of its last call."""

    def timed(*args: Any, **kwargs: Any) -> Any:
        began[0] = time.monotonic()
        return call(*args, **kwargs)

    return timed


def run_scenario(scenario: Scenario, size: int) -> Case:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("fork")  # torch is imported once
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = {}, []
        for rank in range(size):
            receiver, sender = context.Pipe(duplex=False)
            arguments = scenario, rank, size, store.port, folder, sender
            process = context.Process(target=run_rank, args=arguments)
            process.start()
            sender.close()
            pipes[receiver] = rank
            processes.append(process)
        ends: dict[int, RankEnd] = {}
        deadline = time.monotonic() + KILLED_S
        while pipes and (left := deadline - time.monotonic()) > 0:
            for pipe in connection.wait(list(pipes), timeout=left):
                rank = pipes.pop(pipe)  # type: ignore[arg-type]
                with contextlib.suppress(EOFError):
                    ends[rank] = pipe.recv()  # type: ignore[union-attr]
        for process in processes:
            process.join(0 if pipes else 0.5)
            if process.is_alive():
                process.kill()
                process.join()
    for rank, process in enumerate(processes):
        if rank in pipes.values():
            ends[rank] = RankEnd("hang")
        elif rank not in ends:
            code = process.exitcode
            ends[rank] = RankEnd("abort", message=f"exit code {code}") if code else RankEnd("left")
    found = tuple(ends[rank] for rank in range(size))
    return Case(scenario.name, scenario.strategy, size, outcome_of(scenario.kind, found), found)


def outcome_of(kind: type[Loop], ends: tuple[RankEnd, ...]) -> str:
    states = [end.state for end in ends]
    for bad in ("abort", "hang"):
        if bad in states:
            return bad
    if kind.legitimate:
        return "trained" if set(states) == {"finished"} else "refused"
    others, odd = ends[:-1], ends[-1]
    if not all(end.state == "raised" and end.is_autopar_error for end in others):
        return "silent"
    if odd.state != "raised" and not kind.leaves:
        return "silent"
    late = any(end.state == "raised" and end.seconds > TIMEOUT_S + LATE_S for end in ends)
    return "late" if late else "reported"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.disagreements")
    parser.add_argument("--only", default="", help="names of scenarios, separated by commas")
    parser.add_argument("--strategies", type=int, default=1, help="a scenario is run under")
    parser.add_argument("--strategy", default="", choices=["", *STRATEGIES], help="only this one")
    parser.add_argument("--ranks", default="2,3", help="numbers of ranks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    args, console = parser.parse_args(), Console(width=150)
    os.environ["AUTOPAR_CACHE"] = tempfile.mkdtemp(prefix="autopar-disagreements-")
    chosen = scenarios(len(STRATEGIES) if args.strategy else args.strategies)
    if args.strategy:
        chosen = [s for s in chosen if s.strategy == args.strategy]
    if args.only:
        chosen = [s for s in chosen if s.name in args.only.split(",")]
    cases = []
    for scenario in chosen:
        for size in map(int, args.ranks.split(",")):
            case = run_scenario(scenario, size)
            cases.append(case)
            odd = f"{case.ends[0].state} {case.ends[0].error} {case.ends[0].message}"
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
        document = {**about(), "counts": counts, "timeout_s": TIMEOUT_S}
        save(args.json, {**document, "cases": [asdict(case) for case in cases]})
    return int(bool(set(counts) - {"reported", "trained"}))


if __name__ == "__main__":
    sys.exit(main())
