"""Who competes in sending gradients: ways of autopar, and its peers' own.

What a way of autopar is told is a `Strategy` that anybody could write; what is not named is the
default. Peers are set up as their documentation says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.capture.offline import capture_of_rank
from autopar.cost_model.algorithms.wire_bytes import node_bytes
from autopar.passes.core.runner import run_passes
from autopar.passes.pipeline import build_pass_pipeline
from autopar.plan.overlap import Overlap
from autopar.runtime.codegen.program import with_axes
from benchmarks.communication.horovod import Horovod
from benchmarks.contenders import PLAIN, Contender, Step, build_ddp, my_rows, training_step
from benchmarks.models import GPT, Case, blocks_of, next_tokens

Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]

ALONE = "alone"
UNBUCKETED = "unbucketed"
PLANNED = "planned"
WAITING = (UNBUCKETED, "bucketed")
ANY = ""  # whose losses those of a lossy one must be
BUCKET_BYTES = 10 << 20
COMPRESSED_BUCKET_BYTES = 25 << 20  # DDP's own: what is left of them is short
POWERSGD_STARTS = 2  # steps after which torch's hook compresses, the least that it takes


CASES = {
    case.name: case
    for case in (
        Case("gpt", partial(GPT, 6, 256), partial(next_tokens, rows=8, vocabulary=256), blocks_of),
    )
}
"""4.8 M parameters: on 4 processes that share 2 cores, 1 Gbit/s takes as long for their gradients
as they take to compute them."""


def build_alone(case: Case) -> Step:
    """Return the plain model on this rank's rows, which sends nothing."""
    train = training_step(case.build(), case, local=False)
    return lambda x, y: train(my_rows(x), my_rows(y))


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


def bf16_hook(state, bucket):  # type: ignore[no-untyped-def]  # torch wants no text as annotation
    """Do what torch's `bf16_compress_hook` does, which refuses to on any backend but NCCL."""
    whole = bucket.buffer()
    half = whole.to(torch.bfloat16).div_(dist.get_world_size())
    sent = dist.all_reduce(half, async_op=True).get_future()
    return sent.then(lambda done: whole.copy_(done.value()[0]))


@dataclass(frozen=True)
class Way:
    """A training step of autopar, and the plan that it follows."""

    step: Step
    plan: autopar.Plan

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Train one step."""
        return self.step(x, y)


def build_autopar(case: Case, *, strategy: autopar.Strategy) -> Way:
    """Return autopar under a strategy."""
    model = autopar.compile(
        case.build(), example_inputs=case.batch(0), strategy=strategy, fallback=False
    )
    assert model.plan is not None
    return Way(training_step(model, case, local=False), model.plan)


def build_waiting(case: Case, *, strategy: autopar.Strategy) -> Way:
    """Return autopar under a strategy, but every sum waited for as soon as it has started."""
    inputs = case.batch(0)
    model = case.build()
    plan = autopar.plan(model, dist.get_world_size(), example_inputs=inputs, strategy=strategy)
    moments = 2 * len(plan.buckets.reduce)  # a start and a wait for each
    at_once = replace(plan, overlaps=(Overlap(reduce=(0.0,) * moments),), in_flight=1)
    model = autopar.compile(model, example_inputs=inputs, plan=at_once, fallback=False)
    return Way(training_step(model, case, local=False), at_once)


def planned_bytes(case: Case, plan: autopar.Plan, ranks_per_node: int) -> int:
    """Return the bytes that leave a node in a step, as the cost model reads them off the program.

    Where a plan was predicted, its prediction says the same.
    """
    ranks, inputs = plan.world_size, case.batch(0)
    graph = capture_of_rank(case.build(), inputs, 0, ranks, plan.batch, None, None)
    lowered = run_passes(with_axes(graph, plan), build_pass_pipeline(plan, 0, "gloo"))
    return node_bytes(lowered, "gloo", ranks_per_node)


def bucket_shares(plan: autopar.Plan) -> list[float]:
    """Return the part of all gradients that each bucket is, in the order of the backward."""
    sizes = dict(plan.parameter_bytes)
    buckets = [sum(sizes[name] for name in names) for names in plan.buckets.reduce]
    return [size / sum(buckets) for size in buckets]


BUCKETED = autopar.Strategy(
    zero=0, recompute="none", gather_bytes=BUCKET_BYTES, reduce_bytes=BUCKET_BYTES
)
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
COUNTERPARTS = {
    "fp16": ("ddp+fp16", "horovod+fp16"),
    "bf16": ("ddp+bf16",),
    "powersgd": ("ddp+powersgd",),
}
"""Who sends the same; the others are compared with plain DDP."""


def _autopar(name: str, strategy: autopar.Strategy) -> Contender:
    build = partial(build_waiting if name in WAITING else build_autopar, strategy=strategy)
    losses = PLAIN if strategy.compress is None else ANY
    peers = COUNTERPARTS.get(name, ("ddp",))
    return Contender(name, build, peers, module="autopar", reference=losses)


PEERS = (
    Contender(ALONE, build_alone, reference=ANY),
    Contender("ddp", build_ddp),
    Contender("ddp+fp16", partial(build_hooked, hook=fp16_compress_hook), reference=ANY),
    Contender("ddp+bf16", partial(build_hooked, hook=bf16_hook), reference=ANY),
    Contender("ddp+powersgd", build_powersgd, reference=ANY),
    Contender("horovod+fp16", Horovod, module="horovod", reference=ANY),
)


def strategies(ranks_per_node: int) -> dict[str, autopar.Strategy]:
    """Return ways of autopar, each with what those before it have; the compressions all alike."""
    found = {UNBUCKETED: replace(BUCKETED, reduce_bytes=1), "bucketed": BUCKETED}
    last = found["overlapped"] = BUCKETED
    if ranks_per_node > 1:
        last = found["hierarchical"] = replace(BUCKETED, hierarchical=ranks_per_node)
    last = replace(last, reduce_bytes=COMPRESSED_BUCKET_BYTES)
    found |= {name: replace(last, compress=text) for name, text in COMPRESSIONS.items()}
    return found | {PLANNED: autopar.Strategy(zero=0, recompute="none")}


def contenders(ranks_per_node: int) -> tuple[Contender, ...]:
    """Return everyone, the model alone first."""
    contenders = strategies(ranks_per_node).items()
    return (*PEERS, *(_autopar(name, strategy) for name, strategy in contenders))
