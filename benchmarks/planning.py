"""Planning time: from a model to its plan for machines that are not here.

    PYTHONPATH=FOLDER python -m benchmarks.planning --models gpt2-1.5b-128 --before

`seconds` runs from the model, built on the meta device in a process of its own, to the plan, and
`cpu_seconds` is process time of the same span. `peak_bytes` is the process's peak, torch included.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.before import NAME
from benchmarks.published import gpt
from benchmarks.report import about, save


@dataclass(frozen=True)
class Case:
    make: Callable[[], tuple[nn.Module, Any]]  # bfloat16 model and global batch, on meta
    cluster: str
    gpus: int
    strategy: Mapping[str, Any]
    memory: str = "1000GB"  # of each GPU
    limit_s: float | None = None  # seconds after which the search tries no further mesh


def gpt2(rows: int) -> tuple[nn.Module, Any]:
    return gpt.make(gpt.Sizes(1600, 48, 25, 50257, 1024, flash=True, dropout=False), rows)


def llama_70b() -> tuple[nn.Module, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000,
        use_cache=False,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        tokens = torch.zeros(1024, 4096, dtype=torch.long)
    return model, {"input_ids": tokens, "labels": tokens}


PIPELINE = {
    "tp": 8,
    "pp": 4,
    "micro_batches": 32,
    "schedule": "1f1b",
    "zero": 1,
    "recompute": "selective",
    "prefetch": 1,
    "gather_bytes": 2**26,
    "reduce_bytes": 2**26,
}
CASES: Mapping[str, Case] = {
    "gpt2-1.5b": Case(partial(gpt2, 64), "dgx-a100", 16, {}, "80GB"),
    "gpt2-1.5b-128": Case(partial(gpt2, 128), "dgx-h100", 128, {}, "80GB"),
    "llama-70b-1024": Case(llama_70b, "dgx-h100", 1024, PIPELINE),
    "llama-70b-1024-searched": Case(
        llama_70b, "dgx-h100", 1024, {"search": ("pp", "tp")}, "80GB", 60.0
    ),
}


def complete_plan(name: str, package: str = "autopar") -> dict[str, Any]:
    """Make one plan with a package; for a process of its own."""
    torch.set_num_threads(2)
    case, planner = CASES[name], importlib.import_module(package)
    cluster = planner.Cluster.named(case.cluster)
    model, inputs = case.make()
    nodes = max(1, case.gpus // cluster.ranks_per_node)
    start, begun = time.perf_counter(), time.process_time()
    made = planner.plan(
        model,
        case.gpus,
        example_inputs=inputs,
        strategy=planner.Strategy(**case.strategy),
        cluster=planner.Cluster.named(case.cluster, nodes),
        memory=case.memory,
        backend="inductor",
        time_limit_s=case.limit_s,
    )
    taken, computed = time.perf_counter() - start, time.process_time() - begun
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    axes = ", ".join(f"{axis}={size}" for axis, size in made.mesh if size > 1)
    label = name if package == "autopar" else f"{name} before"
    return {
        "model": label,
        "axes": axes,
        "seconds": taken,
        "cpu_seconds": computed,
        "peak_bytes": peak,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=[*CASES], default=[*CASES])
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--before", action="store_true", help="plan with autopar_before too")
    options = parser.parse_args(arguments)
    rows = []
    packages = ("autopar", NAME) if options.before else ("autopar",)
    for job in itertools.product(options.models, packages):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            row = pool.apply(complete_plan, job)
        rows.append(row)
        print(
            f"{row['model']} {row['axes']}: {row['seconds']:.1f} s, "
            f"{row['cpu_seconds']:.1f} computed, {row['peak_bytes'] / 2**30:.2f} GiB",
            flush=True,
        )
    if options.json:
        save(options.json, {**about(), "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
