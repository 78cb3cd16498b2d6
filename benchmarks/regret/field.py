"""Whose steps are compared: an enumeration of plans, the plans chosen, and peers.

A plan of the enumeration is what the planner makes of a `Strategy` that names the mesh, the stage,
the recomputation, the schedule and the size of buckets; placements, cuts and the order of
collectives are left to it. So it is known what each is predicted to cost, by the prices that
choose.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from torch import Tensor

import autopar
from autopar.cost_model.cluster.cluster import Cluster
from benchmarks.contenders import (
    Contender,
    Step,
    build_ddp,
    build_fully_shard,
    build_megatron,
    build_pipelining,
    training_step,
)
from benchmarks.models import GPT, Case, ConvNet, Encoder
from benchmarks.pipelining import STAGES_PER_RANK, micro_batches

DATA_PARALLEL = ("ddp", "fully_shard")
"""The peers that a gain is over."""

CHOSEN = "chosen"
REPLICATED = "zero0"
"""The plan of the enumeration that a cap is a part of."""

FIXED = partial(autopar.Strategy, gather_bytes=1 << 20, reduce_bytes=1 << 20)
"""Buckets that make a few of models of some megabytes."""


@dataclass(frozen=True)
class Layout:
    """Where the ranks are.

    Attributes:
        nodes: of the emulated cluster.
        ranks_per_node: processes on each.
    """

    nodes: int
    ranks_per_node: int

    @property
    def ranks(self) -> int:
        """Processes in all."""
        return self.nodes * self.ranks_per_node

    @staticmethod
    def of(text: str) -> Layout:
        """Return the layout behind a text such as "2x2"."""
        nodes, each = map(int, text.split("x"))
        return Layout(nodes, each)

    def __str__(self) -> str:
        return f"{self.nodes}x{self.ranks_per_node}"


def enumeration(case: Case, layout: Layout) -> dict[str, autopar.Strategy]:
    """Return the strategies that are measured for a model, by name; some may turn out not to do."""
    plain = partial(FIXED, recompute="none")
    found = {f"zero{stage}": plain(zero=stage) for stage in range(4)}
    for stage in (0, 3):
        found[f"zero{stage}, recomputed"] = FIXED(zero=stage, recompute="full")
    if layout.nodes > 1 < layout.ranks_per_node:
        found["zero0, by level"] = plain(zero=0, hierarchical=True)
        found["hybrid"] = plain(zero=3, dp_shard=layout.ranks_per_node)
    for ranks in (n for n in range(2, layout.ranks + 1) if layout.ranks % n == 0):
        whole = ranks == layout.ranks
        found[f"tp{ranks}"] = plain(tp=ranks, zero=0)
        if not whole:
            found[f"tp{ranks}, zero3"] = plain(tp=ranks, zero=3)
        if experts := getattr(case, "experts", {}):
            found[f"ep{ranks}"] = plain(ep=ranks, zero=0, placements=experts)
        found |= dict(_pipelines(ranks, whole=whole))
    if layout.ranks % 4 == 0:
        half = layout.ranks // 2
        found[f"pp2, tp{half}"] = plain(pp=2, tp=half, zero=0, micro_batches=4, schedule="1f1b")
    return found


def _pipelines(ranks: int, *, whole: bool) -> Iterator[tuple[str, autopar.Strategy]]:
    """Pipelines over so many ranks: over all of them under every schedule."""
    for schedule, several in STAGES_PER_RANK.items():
        if whole or schedule == "1f1b":
            yield (
                f"pp{ranks}, {schedule}",
                FIXED(
                    pp=ranks,
                    zero=0,
                    recompute="none",
                    micro_batches=micro_batches(ranks),
                    schedule=schedule,
                    stages_per_rank=several,
                ),
            )


def peers(case: Case, layout: Layout) -> list[Contender]:
    """Return the peers that can train a model; those by hand know only models of this project."""
    model = case.build()
    found = [Contender("ddp", build_ddp), Contender("fully_shard", build_fully_shard)]
    if isinstance(model, GPT | Encoder):
        found.append(Contender("parallelize_module", partial(build_megatron, sequence=False)))
    if isinstance(model, GPT | Encoder | ConvNet) and len(case.blocks(model)) >= layout.ranks:
        build = partial(build_pipelining, schedule="1f1b")
        found.append(Contender("pipelining-1f1b", build, micro_batched=True))
    return found


def chosen_name(share: float | None) -> str:
    """Return what the plan chosen under a cap is called; the cap is a share of what DDP needs."""
    return CHOSEN if share is None else f"{CHOSEN} under {share:g}"


@dataclass(frozen=True)
class Planned:
    """A training step of autopar, the plan that it follows, and how long it took to make.

    Attributes:
        step: None once it has been let go.
        plan: with its prediction.
        seconds: of capturing, measuring, planning and emitting.
    """

    step: Step | None
    plan: autopar.Plan
    seconds: float

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Train one step."""
        assert self.step is not None
        return self.step(x, y)


def build_plan(
    case: Case,
    *,
    cluster: Cluster,
    strategy: autopar.Strategy | str,
    memory: Callable[[], int | None],
    time_limit_s: float | None = None,
) -> Planned:
    """Return autopar, planned for what runs here."""
    start = time.perf_counter()
    model = autopar.compile(
        case.build(),
        example_inputs=case.batch(0),
        strategy=strategy,
        memory=memory(),
        cluster=cluster,
        fallback=False,
        time_limit_s=time_limit_s,
    )
    taken = time.perf_counter() - start
    assert model.plan is not None
    return Planned(training_step(model, case, local=False), model.plan, taken)


def held_by_caller(case: Case) -> int:
    """Return the bytes of a batch: a prediction of memory counts them, what is counted does not."""
    return sum(tensor.nbytes for tensor in case.batch(0))
