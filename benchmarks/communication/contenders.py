"""Contenders in gradient communication: strategies of autopar, and hooks of torch's DDP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.capture.batch_slices import capture_of_rank
from autopar.cost_model.algorithms.wire_bytes import node_bytes
from autopar.passes.core.runner import run_passes
from autopar.passes.pipeline import build_pass_pipeline
from autopar.runtime.codegen.program import with_axes
from benchmarks.contenders import (
    PLAIN,
    Contender,
    Step,
    build_ddp,
    build_planned,
    local_rows,
    training_step,
)
from benchmarks.models import GPT, Case, blocks_of, next_tokens

Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]

ALONE = "alone"
"""The model on each rank's rows, without communication."""

PLANNED = "planned"
"""autopar with communication left to the planner, which measures first."""

LOSSY = ""
"""Reference of a contender whose losses are not compared."""

BUCKET_BYTES = 10 << 20
COMPRESSED_BUCKET_BYTES = 25 << 20
"""Default of DDP."""

POWERSGD_STARTS = 2
"""Steps before torch's hook compresses, the least that it takes."""

CASES = {
    "gpt": Case(
        "gpt", partial(GPT, 6, 256), partial(next_tokens, rows=8, vocabulary=256), blocks_of
    )
}
"""4.8 M parameters: on 4 processes of 2 cores, computing gradients takes as long as sending them at
1 Gbit/s."""


def build_alone(case: Case) -> Step:
    """Return the plain model on this rank's rows, without communication."""
    train = training_step(case.build(), case, local=False)
    return lambda x, y: train(local_rows(x), local_rows(y))


def build_hooked(case: Case, *, hook: Hook) -> Step:
    """Return torch's DistributedDataParallel with a communication hook."""
    model = DistributedDataParallel(case.build())
    model.register_comm_hook(None, hook)
    return training_step(model, case, local=True)


def build_powersgd(case: Case) -> Step:
    """Return torch's DistributedDataParallel with its PowerSGD.

    All gradients are one bucket: between several, gloo's ranks start the hook's collectives in
    different orders, and die.
    """
    model = DistributedDataParallel(case.build(), bucket_cap_mb=1024)
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=4, start_powerSGD_iter=POWERSGD_STARTS
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return training_step(model, case, local=True)


def planned_bytes(case: Case, plan: autopar.Plan, ranks_per_node: int) -> int:
    """Return the bytes that leave a node in a step, by the cost model."""
    ranks, inputs = plan.world_size, case.batch(0)
    graph = capture_of_rank(case.build(), inputs, 0, ranks, plan.batch, None, None)
    lowered = run_passes(with_axes(graph, plan), build_pass_pipeline(plan, 0, "gloo"))
    return node_bytes(lowered, "gloo", ranks_per_node)


COMPRESSIONS = {
    "bf16": "bf16",
    "fp16": "fp16",
    "int8": "int8",
    "powersgd": "powersgd(rank=4)",
    "topk": "topk(density=0.01)",
    "randomk": "randomk(density=0.01)",
    "threshold": "threshold(threshold=1e-4)",
    "sign": "sign",
}
SAME_BYTES = {"fp16": "ddp+fp16", "powersgd": "ddp+powersgd"}
"""Compression -> peer that sends the same; the others are compared with plain DDP."""

PEERS = (
    Contender(ALONE, build_alone, reference=LOSSY),
    Contender("ddp", build_ddp),
    Contender("ddp+fp16", partial(build_hooked, hook=fp16_compress_hook), reference=LOSSY),
    Contender("ddp+powersgd", build_powersgd, reference=LOSSY),
)


def strategies(ranks_per_node: int) -> dict[str, autopar.Strategy]:
    """Return strategies of autopar by name."""
    bucketed = autopar.Strategy(
        zero=0, recompute="none", gather_bytes=BUCKET_BYTES, reduce_bytes=BUCKET_BYTES
    )
    found = {"unbucketed": replace(bucketed, reduce_bytes=1), "bucketed": bucketed}
    if ranks_per_node > 1:
        bucketed = found["hierarchical"] = replace(bucketed, hierarchical=ranks_per_node)
    large = replace(bucketed, reduce_bytes=COMPRESSED_BUCKET_BYTES)
    found |= {name: replace(large, compress=text) for name, text in COMPRESSIONS.items()}
    return found | {PLANNED: autopar.Strategy(zero=0, recompute="none")}


def contenders(ranks_per_node: int) -> tuple[Contender, ...]:
    """Return all contenders, the model alone first."""
    made = []
    for name, strategy in strategies(ranks_per_node).items():
        build = partial(build_planned, strategy=strategy)
        peer = SAME_BYTES.get(name, "ddp")
        reference = PLAIN if strategy.compress is None else LOSSY
        made.append(Contender(name, build, (peer,), module="autopar", reference=reference))
    return (*PEERS, *made)
