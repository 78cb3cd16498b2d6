"""`python -m benchmarks.faults.elastic`: 4 -> 3 -> 4 -> 2 -> 4 nodes while training, repeatedly.

A node is a launcher with one rank; a dead one is killed with its rank, and comes back by itself
later. With `--namespaces` each has a network of its own, and goes by its link too.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.cluster import Network
from benchmarks.faults import runs
from benchmarks.faults.runs import Node, Run
from benchmarks.faults.train import EVERY, plain_losses
from benchmarks.faults.warm import Nursery
from benchmarks.report import about, empty_table, save, wide_console

GOOD = 3  # steps that must follow a change
ENDLESS = 5000  # steps


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults.elastic")
    add = parser.add_argument
    add("--rounds", type=int, default=10)
    add("--nodes", type=int, default=4)
    add("--strategy", default="zero3", help="or auto, which plans anew")
    add("--limit", type=float, default=120.0, help="seconds after which a change has hung")
    add("--silence", type=int, default=5, help="seconds until a silent node counts as gone")
    add("--namespaces", action="store_true", help="nodes with networks of their own (root)")
    add("--json", type=Path)
    options = parser.parse_args()
    changes, events = [], []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="elastic-")))
        network = stack.enter_context(Network(options.nodes)) if options.namespaces else None
        stack.enter_context(Nursery(folder / "nursery"))
        address = network.address(0) if network else "127.0.0.1"
        endpoint = f"{address}:{29400 if network else free_port()}"
        run = Run(
            folder / "run",
            options.strategy,
            0,
            options.limit,
            (1, options.nodes),
            endpoint,
            options.silence,
        )
        nodes = [Node(1, network.namespace(n) if network else "") for n in range(options.nodes)]
        stack.enter_context(run)
        for change in each_change(run, nodes, options):
            changes.append(change)
            print(change, flush=True)
            if change["seconds"] is None:
                break
        events = run.events()
        if changes[-1]["seconds"] is None:
            for log in sorted(run.folder.glob("launcher-*")):
                print(log.name, log.read_text()[-2000:])
    steps = [each for each in events if each["event"] == "step"]
    wrong = runs.wrong_losses(events, plain_losses(max(each["step"] for each in steps)))
    if options.json:
        figures = {"strategy": options.strategy, "namespaces": options.namespaces}
        document = {**about(), **figures, "changes": changes, "wrong_steps": len(wrong)}
        save(options.json, {**document, "planning_s": planning_seconds(events)})
    wide_console().print(table(changes, len(wrong)))
    return int(bool(wrong) or changes[-1]["seconds"] is None)


def each_change(
    run: Run, nodes: Sequence[Node], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Take nodes away and bring them back; yield the seconds until training went on."""
    for number, node in enumerate(nodes):
        run.start(number, node, ENDLESS)
    most = len(nodes)
    yield until_training(run, 0, most, "kill", options.limit)
    for turn in range(options.rounds):
        for gone in (1, 2):
            leaving = [1 + (turn + number) % (most - 1) for number in range(gone)]
            how = "link" if options.namespaces and turn % 2 else "kill"
            for number in leaving:
                take_away(run, number, nodes[number], how)
            yield until_training(run, most, most - gone, how, options.limit)
            for number in leaving:
                bring_back(run, number, nodes[number], how)
            yield until_training(run, most - gone, most, how, options.limit)


def take_away(run: Run, number: int, node: Node, how: str) -> None:
    if how == "link":
        subprocess.run(["ip", "-n", node.namespace, "link", "set", "eth0", "down"], check=True)
    else:
        pid = run.launchers.pop(number)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def bring_back(run: Run, number: int, node: Node, how: str) -> None:
    if how == "link":
        subprocess.run(["ip", "-n", node.namespace, "link", "set", "eth0", "up"], check=True)
    else:
        run.start(number, node, ENDLESS)


def until_training(run: Run, before: int, after: int, how: str, limit_s: float) -> dict[str, Any]:
    """Wait for steps of `after` ranks; `seconds` is None if none came."""
    began, known = time.time(), len(run.events())
    last = max((e["step"] for e in run.events() if e["event"] == "step"), default=0)
    found: list[Mapping[str, Any]] = []
    while len(found) < GOOD and time.time() < began + limit_s:
        time.sleep(0.2)
        later = run.events()[known:]
        found = [e for e in later if e["event"] == "step" and e["ranks"] == after]
    seconds = found[0]["time"] - began if len(found) >= GOOD else None
    lost = max(0, last - found[0]["step"] + 1) if found else 0
    return {
        "before": before,
        "after": after,
        "how": how,
        "seconds": seconds and round(seconds, 2),
        "lost_steps": lost,
    }


def planning_seconds(events: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the seconds of compile on rank 0 in each attempt, the meeting of ranks included."""
    starts: dict[str, float] = {}
    found = []
    for each in events:
        if each["rank"] == 0 and each["event"] == "start":
            starts[each["attempt"]] = each["time"]
        if each["rank"] == 0 and each["event"] == "planned" and each["attempt"] in starts:
            found.append(round(each["time"] - starts[each["attempt"]], 2))
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def table(changes: Sequence[Mapping[str, Any]], wrong: int) -> Any:
    title = f"steps with another loss than one process: {wrong}; a checkpoint every {EVERY} steps"
    drawn = empty_table(title, "nodes", ("how", "times", "next step, s", "worst, s", "lost steps"))
    kinds = dict.fromkeys((each["before"], each["after"], each["how"]) for each in changes)
    for before, after, how in kinds:
        mine = [c for c in changes if (c["before"], c["after"], c["how"]) == (before, after, how)]
        seconds = sorted(c["seconds"] for c in mine if c["seconds"] is not None)
        drawn.add_row(
            f"{before} -> {after}",
            how,
            f"{len(seconds)} of {len(mine)}",
            f"{seconds[len(seconds) // 2]:.1f}" if seconds else "",
            f"{seconds[-1]:.1f}" if seconds else "",
            str(max(c["lost_steps"] for c in mine)),
        )
    return drawn


if __name__ == "__main__":
    raise SystemExit(main())
