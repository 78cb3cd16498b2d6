"""Messages of data parallelism under a pipeline, over emulated links, before a commit and after it.

    PYTHONPATH=FOLDER python -m benchmarks.stage_messages --nodes 4 --rate 1gbit --pp 4 --json FILE

FOLDER has an earlier commit (`benchmarks.before`). Both versions train one model in the same
processes (root), in turn; and again over links without a limit, which shows the step without the
messages. The share that is hidden is 1 - (step - that step) / (seconds that all stages' messages
take on their links).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cluster import Network, launch
from benchmarks.cluster.network import bits_per_second
from benchmarks.report import about, empty_table, save, wide_console
from benchmarks.stage_messages.worker import VERSIONS


def main() -> int:
    """Measures one cluster under ZeRO 1 and 2."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stage_messages")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--ranks-per-node", type=int, default=1)
    parser.add_argument("--rate", default="1gbit", help="of each link")
    parser.add_argument("--pp", type=int, default=2, help="number of stages")
    parser.add_argument("--zero", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=12, help="steps of each version")
    parser.add_argument("--json", type=Path, help="add the rows to this file")
    given = parser.parse_args()
    found = [measure(given, zero) for zero in given.zero]
    drawn = empty_table("Messages under a pipeline", "plan", ("version", "step, ms", "hidden"))
    for row in found:
        for version in VERSIONS:
            step_s, hidden = row[version]["step_s"], row[version]["hidden"]
            drawn.add_row(row["plan"], version, f"{1e3 * step_s:.0f}", f"{100 * hidden:.0f} %")
    wide_console().print(drawn)
    if given.json is not None:
        before = json.loads(given.json.read_text())["rows"] if given.json.exists() else []
        save(given.json, {**about(), "rows": [*before, *found]})
    return 0


def measure(given: argparse.Namespace, zero: int) -> dict[str, Any]:
    """One plan of both versions: medians of the slowest rank's steps."""
    runs = {rate: run(given, zero, rate) for rate in (given.rate, None)}
    limited, free = runs[given.rate], runs[None]
    wire_s = 8 * limited["sent_bytes"] / bits_per_second(given.rate)
    row: dict[str, Any] = {
        "pp": given.pp,
        "zero": zero,
        "nodes": given.nodes,
        "ranks_per_node": given.ranks_per_node,
        "rate": given.rate,
        "plan": f"pp {given.pp}, zero {zero}, {given.nodes} x {given.ranks_per_node}, {given.rate}",
        "sent_bytes_of_a_stage": limited["sent_bytes"],
        "loss_difference": limited["loss_difference"],
    }
    for version in VERSIONS:
        step_s, without_s = median(limited[version]), median(free[version])
        row[version] = {
            "step_s": step_s,
            "without_messages_s": without_s,
            "hidden": 1.0 - (step_s - without_s) / (given.pp * wire_s),
        }
    row["ratio"] = row["after"]["step_s"] / row["before"]["step_s"]
    return row


def run(given: argparse.Namespace, zero: int, rate: str | None) -> dict[str, Any]:
    """What rank 0 writes of a run over one kind of links."""
    with tempfile.TemporaryDirectory() as name, Network(given.nodes, rate) as network:
        folder = Path(name)
        words = [str(x) for x in (given.pp, zero, given.rounds, folder / "answer.json")]
        command = [sys.executable, "-m", "benchmarks.stage_messages.worker", *words]
        launch(network, command, given.ranks_per_node, logs=folder, timeout_s=600.0)
        answer: dict[str, Any] = json.loads((folder / "answer.json").read_text())
        return answer


if __name__ == "__main__":
    sys.exit(main())
