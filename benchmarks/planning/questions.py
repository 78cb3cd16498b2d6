"""Plans of large models beside practitioners' layouts, pinned and priced by the same model.

    python -m benchmarks.planning.questions --only mixtral --json FILE

Each question gets `--limit` seconds. `ratio` is the step of the chosen plan over that of the
fastest usual layout: those that the plan names, and the published recipes of the question, each
planned by itself. `mfu` counts matrix products and attention, forward and backward, none twice.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import autopar
from autopar.core.common.deadline import Deadline
from autopar.session import offline
from benchmarks.planning import large
from benchmarks.planning.models import Made
from benchmarks.report import about, save

ALL = ("pp", "tp", "ep", "cp", "dp_shard")
S = autopar.Strategy


@dataclass(frozen=True)
class Question:
    """A model on a cluster.

    Attributes:
        recipes: published layouts, by their source.
        mfu: published utilisation of a similar run; 0 if none is known.
        source: origin of `mfu`.
        recipe_limit_s: seconds for each published layout.
        precision: autocast; None where parameters are bfloat16.
    """

    make: Callable[[], Made]
    cluster: str
    gpus: int
    recipes: Mapping[str, autopar.Strategy]
    mfu: float = 0.0
    source: str = ""
    precision: str | None = "bf16"
    recipe_limit_s: float = 30.0


LLAMA3 = "arXiv 2407.21783, table 4"
TITAN = "torchtitan, docs/performance.md"
BRIDGE = "Megatron-Bridge, docs/performance-summary-archive.md"
FOLDING = "arXiv 2504.14960, table 1"
L8 = partial(large.llama, "8b")
FSDP, EXPERTS = S(zero=3), S(zero=1, ep=8)

QUESTIONS: Mapping[str, Question] = {
    # The table of questions of the larger abilities.
    "mixtral-16": Question(
        partial(large.mixtral, 32), "dgx-h100", 16, {FOLDING: S(zero=3, ep=8)}, precision=None
    ),
    "mixtral-64": Question(
        partial(large.mixtral, 256), "dgx-h100", 64, {FOLDING: S(zero=1, ep=8, pp=2)},
        precision=None,
    ),
    "llama-8b-131k-8": Question(
        partial(L8, 1, 131072), "dgx-h100", 8, {TITAN: S(zero=3, cp=8)}
    ),
    "llama-8b-262k-32": Question(
        partial(L8, 4, 262144), "dgx-h100", 32, {TITAN: S(zero=3, cp=8)}
    ),
    "llama-8b-16": Question(partial(L8, 16), "dgx-h100", 16, {TITAN: FSDP}, 0.40, TITAN),
    "llama-405b-16384": Question(
        partial(large.llama, "405b", 2048), "dgx-h100", 16384,
        {LLAMA3: S(zero=2, tp=8, pp=16, micro_batches=16)}, 0.41, LLAMA3,
    ),
    # Ten more.
    "llama-8b-8-a100": Question(partial(L8, 16), "dgx-a100", 8, {TITAN: FSDP}),
    "llama-70b-64": Question(
        partial(large.llama, "70b", 128), "dgx-h100", 64,
        {"Megatron": S(zero=1, tp=4, pp=4), TITAN: FSDP},
    ),
    "llama-70b-256-h200": Question(
        partial(large.llama, "70b", 512), "dgx-h200", 256, {TITAN: FSDP, "tp": S(zero=3, tp=8)}
    ),
    "llama-405b-1024-b200": Question(
        partial(large.llama, "405b", 1024), "dgx-b200", 1024, {"Megatron": S(zero=1, tp=8, pp=8)}
    ),
    "llama-405b-131072": Question(
        partial(large.llama, "405b", 16384), "dgx-h100", 131072,
        {LLAMA3: S(zero=2, tp=8, pp=16, micro_batches=16)},
    ),
    "gpt-3-1024-a100": Question(
        partial(large.gpt3, 1536), "dgx-a100", 1024,
        {"arXiv 2104.04473, table 1": S(zero=0, tp=8, pp=16)}, 0.37,
        "arXiv 2104.04473: 140 TFLOP/s with a second forward", precision=None,
    ),
    "mixtral-8x22b-128": Question(
        partial(large.mixtral, 256, large=True), "dgx-h100", 128,
        {FOLDING: S(zero=1, tp=2, ep=4, pp=4)}, 0.49, FOLDING, precision=None,
    ),
    "deepseek-v3-1024": Question(
        partial(large.deepseek_v3, 4096), "dgx-h100", 1024,
        {BRIDGE: S(zero=1, pp=8, ep=64, micro_batches=32)}, 0.35,
        "arXiv 2412.19437, table 1: 2,664K H800 hours for 14.8T tokens, in FP8", precision=None,
        recipe_limit_s=150.0,
    ),
    "qwen3-moe-16": Question(
        partial(large.qwen3_moe, 512), "dgx-h100", 16, {BRIDGE: EXPERTS}, precision=None
    ),
    "vit-22b-64": Question(
        partial(large.vit_22b, 4096), "dgx-h100", 64, {"FSDP": FSDP}, 0.55,
        "arXiv 2302.05442, on TPU v4", precision=None,
    ),
    "unet-32": Question(partial(large.unet, 1024), "dgx-a100", 32, {"DDP": S(zero=0)}),
    "dlrm-16": Question(partial(large.dlrm, 65536), "dgx-a100", 16, {"FSDP": FSDP}),
}  # fmt: skip


def ask(name: str, limit_s: float, clock: str) -> dict[str, Any]:
    """The plan of a question and its usual layouts; in a process of its own."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if clock == "cpu":
        offline.Deadline = partial(Deadline, clock=time.process_time)  # type: ignore[misc,assignment]
    question = QUESTIONS[name]
    begin_s, computed_s = time.monotonic(), time.process_time()
    row: dict[str, Any] = {"name": name, "gpus": question.gpus, "cluster": question.cluster}
    usual: dict[str, float] = {}
    try:
        plan = planned(question, S(search=ALL), limit_s)
        assert plan.prediction is not None
        assert plan.search is not None
        row |= figures(plan, question.gpus)
        usual |= {each.name: each.step_s for each in plan.search.practice if each.step_s}
        row["without"] = {each.name: each.why for each in plan.search.practice if each.why}
    except autopar.AutoparError as error:
        row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
    row["seconds"] = time.monotonic() - begin_s
    row["cpu_seconds"] = time.process_time() - computed_s
    row["peak_bytes"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for source, strategy in question.recipes.items():
        try:
            recipe = planned(question, strategy, question.recipe_limit_s)
            assert recipe.prediction is not None
            row.setdefault("recipes", {})[source] = figures(recipe, question.gpus)
            usual[source] = recipe.prediction.step_s
        except autopar.AutoparError as error:
            row.setdefault("without", {})[source] = f"{type(error).__name__}: {str(error)[:200]}"
    best_s = min(usual.values(), default=0.0)
    ratio = row["step_s"] / best_s if best_s and "step_s" in row else None
    published = {"published_mfu": question.mfu, "source": question.source} if question.mfu else {}
    return row | {"usual": usual, "ratio": ratio} | published


def cluster_of(question: Question) -> autopar.Cluster:
    nodes = question.gpus // autopar.Cluster.named(question.cluster).ranks_per_node
    return autopar.Cluster.named(question.cluster, nodes)


def planned(
    question: Question,
    strategy: autopar.Strategy,
    limit_s: float,
    *,
    made: Made | None = None,
    progress: Callable[[Any], None] = lambda progress: None,
) -> autopar.Plan:
    model, inputs = made or question.make()
    return autopar.plan(
        model,
        question.gpus,
        example_inputs=inputs,
        cluster=cluster_of(question),
        strategy=strategy,
        precision=question.precision,
        time_limit_s=limit_s,
        progress=progress,
    )


def figures(plan: autopar.Plan, gpus: int) -> dict[str, Any]:
    p, found = plan.prediction, plan.search
    assert p is not None
    return {
        "plan": plan.name,
        "step_s": p.step_s,
        "needed_bytes": p.needed_bytes,
        "mfu": p.work.utilisation(p.step_s, gpus) if p.work else None,
        "looked": found.looked if found else 0,
        "left_out": found.left_out if found else 0,
        "bound_s": found.bound_s if found else 0.0,
    }


def line_of(row: Mapping[str, Any]) -> str:
    spent = f"{row['seconds']:.0f} s ({row['cpu_seconds']:.0f} computed), "
    spent += f"{row['peak_bytes'] / 2**30:.2f} GiB"
    if "error" in row:
        return f"{row['name']}: {row['error']}; {spent}"
    ratio = "no usual layout" if row["ratio"] is None else f"{row['ratio']:.3f} of the usual"
    mfu = f", MFU {row['mfu']:.0%}" if row["mfu"] else ""
    return f"{row['name']}: {row['plan']}: {row['step_s']:.4g} s{mfu}, {ratio}; {spent}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.planning.questions", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=[*QUESTIONS], default=[*QUESTIONS])
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of a question")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="of the limit")
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args(arguments)
    rows = []
    for name in options.only:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            rows.append(pool.apply(ask, (name, options.limit, options.clock)))
        print(line_of(rows[-1]), flush=True)
        if options.json:
            save(options.json, {**about(), "limit_s": options.limit, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
