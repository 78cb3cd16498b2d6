"""`python -m benchmarks.slow_links`: bytes, steps/s and loss of ways to train over slow links.

Each contender trains the example GPT on the same tokens, one rank a node, over an emulated network
(root). Contenders share no machine time: they run one after the other.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.cluster import Network, launch
from benchmarks.report import about, empty_table, save, wide_console
from benchmarks.slow_links.contenders import NAMES

BASE = "ddp"


def run(name: str, options: dict[str, Any], nodes: int, rate: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, Network(nodes, rate) as network:
        answer = Path(folder, "answer.json")
        module = [sys.executable, "-m", "benchmarks.slow_links.worker"]
        launch(network, [*module, name, json.dumps(options), str(answer)], 1, logs=Path(folder))
        return json.loads(answer.read_text())


def table(results: list[dict[str, Any]]) -> Any:
    headings = ("sent, MB/step", "steps/s", "/ ddp's", "validation loss", "/ ddp's")
    drawn = empty_table("Slow links", "contender", headings)
    base = next((each for each in results if each["contender"] == BASE), None)
    for each in results:
        speed, loss = each["steps_per_s"], each["validation_loss"]
        drawn.add_row(
            each["contender"],
            f"{each['sent_bytes_per_step'] / 1e6:.2f}",
            f"{speed:.2f}",
            f"{speed / base['steps_per_s']:.1f}" if base else "",
            f"{loss:.3f}",
            f"{loss / base['validation_loss']:.3f}" if base else "",
        )
    return drawn


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slow_links", description=__doc__)
    add = parser.add_argument
    add("--contenders", nargs="+", choices=NAMES, default=NAMES)
    add("--nodes", type=int, default=3)
    add("--rate", default="100mbit")
    add("--steps", type=int, default=240)
    add("--every", type=int, default=12, help="optimizer steps between averages")
    add("--rows", type=int, default=24, help="of the global batch")
    add("--seq", type=int, default=128)
    add("--lr", type=float, default=2e-3, help="of AdamW")
    add("--warm-up", type=int, help="steps of a rising learning rate, before a cosine")
    add("--json", type=Path, help="file of the figures; those of the same setting are kept")
    given = parser.parse_args()
    names = ("steps", "every", "rows", "seq", "lr", "warm_up")
    options = {name: getattr(given, name) for name in names}
    setting = {**options, "nodes": given.nodes, "rate": given.rate}
    results = []
    if given.json and given.json.exists():
        known = json.loads(given.json.read_text())
        results = known["results"] if known["setting"] == setting else []
    done = [each["contender"] for each in results]
    for name in (name for name in given.contenders if name not in done):
        results.append(run(name, options, given.nodes, given.rate))
        print(json.dumps(results[-1]), flush=True)
        if given.json:
            save(given.json, {**about(), "setting": setting, "results": results})
    wide_console().print(table(results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
