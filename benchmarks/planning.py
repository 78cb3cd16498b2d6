"""How long planning takes: from a model to its placements along an axis.

    python -m benchmarks.planning --json FILE

Each model is built without memory (meta device) and planned in a process of its own, for the
ranks of one node of a shipped cluster. `seconds` runs from the built model to the plan: capture,
rules, prices, solver. `peak_bytes` is the most that the process held, torch included.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.api import capture_of_rank
from autopar.cost_model.cluster import Cluster
from autopar.cost_model.liveness import Overhead
from autopar.cost_model.operators import OperatorTimes
from autopar.cost_model.update import UpdateCost
from autopar.planner.machine import Machine
from autopar.planner.placements import partition
from benchmarks.report import machine, versions

ROWS, LENGTH, RANKS, CLUSTER = 1, 2048, 8, "dgx-h100"

LLAMA: Mapping[str, dict[str, int]] = {
    "llama-7b": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    },
    "llama-70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
}


@dataclass(frozen=True)
class Row:
    """One planned model.

    Attributes:
        model: its name.
        axes: the mesh that it is planned for.
        seconds: from the built model to its plan.
        peak_bytes: the most that the process held.
        gap: by which fraction a better solution could exist.
        parts: seconds of each part.
    """

    model: str
    axes: str
    seconds: float
    peak_bytes: int
    gap: float
    parts: Mapping[str, float]


def plan(name: str) -> Row:
    """Plans one model; for a process of its own."""
    torch.set_num_threads(2)
    model, inputs = llama(name)
    start = time.perf_counter()
    graph = capture_of_rank(model, inputs, 0, 1, "global", None, None)
    captured = time.perf_counter()
    cluster = Cluster.named(CLUSTER)
    operators = OperatorTimes.load(cluster.device)
    known = Machine(cluster, operators, UpdateCost.modelled(operators.roofline), Overhead())
    solution = partition(graph, RANKS, known)
    end = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    parts = {"capture": captured - start, "placements": end - captured}
    return Row(name, f"tp={RANKS}", end - start, peak, solution.gap, parts)


def llama(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A llama on the meta device, and the arguments of a call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=32000, use_cache=False, **LLAMA[name])
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        tokens = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    return model, {"input_ids": tokens, "labels": tokens}


def main(arguments: list[str] | None = None) -> int:
    """Prints a line for each model; writes all rows if asked to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(LLAMA), default=list(LLAMA))
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args(arguments)
    rows = []
    for name in options.models:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            row = pool.apply(plan, (name,))
        rows.append(row)
        parts = ", ".join(f"{part} {seconds:.1f} s" for part, seconds in row.parts.items())
        print(
            f"{row.model} {row.axes}: {row.seconds:.1f} s ({parts}), "
            f"{row.peak_bytes / 2**30:.2f} GiB, gap {row.gap:.2%}"
        )
    if options.json:
        found = {
            "machine": machine(),
            "versions": versions(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "rows": [asdict(row) for row in rows],
        }
        options.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
