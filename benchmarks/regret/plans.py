"""The enumeration of plans, and contenders made of plans.

The planner makes a plan of the enumeration from a `Strategy` that names the mesh, the ZeRO stage,
recomputation, the schedule and the size of buckets. It chooses placements, split points and the
order of collectives, and predicts the step by the costs that also choose the best plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import autopar
from benchmarks.contenders import Contender, build_ddp, build_fully_shard
from benchmarks.models import Case

PEERS = (Contender("ddp", build_ddp), Contender("fully_shard", build_fully_shard))

CHOSEN = "chosen"
REPLICATED = "zero0"  # the plan of the enumeration that memory caps refer to

FIXED = partial(autopar.Strategy, gather_bytes=1 << 20, reduce_bytes=1 << 20)
"""A few buckets for models of some megabytes."""

STAGES_PER_RANK = {
    "gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 1, "zbv": 2, "dualpipe_v": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """Ranks of an emulated cluster."""

    nodes: int  # number of nodes
    ranks_per_node: int  # processes on each

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @staticmethod
    def of(text: str) -> Layout:
        """Return the layout of a text such as "2x2"."""
        return Layout(*map(int, text.split("x")))

    def __str__(self) -> str:
        return f"{self.nodes}x{self.ranks_per_node}"


def enumeration(case: Case, layout: Layout) -> dict[str, autopar.Strategy]:
    """Return the measured strategies for a model by name; some may turn out infeasible."""
    plain = partial(FIXED, recompute="none")
    found = {f"zero{stage}": plain(zero=stage) for stage in range(4)}
    for stage in (0, 3):
        found[f"zero{stage}, recomputed"] = FIXED(zero=stage, recompute="full")
    if layout.nodes > 1 < layout.ranks_per_node:
        found["zero0, by level"] = plain(zero=0, hierarchical=True)
        found["hybrid"] = plain(zero=3, dp_shard=layout.ranks_per_node)
    for ranks in (n for n in range(2, layout.ranks + 1) if layout.ranks % n == 0):
        found[f"tp{ranks}"] = plain(tp=ranks, zero=0)
        if ranks < layout.ranks:
            found[f"tp{ranks}, zero3"] = plain(tp=ranks, zero=3)
        if case.experts:
            found[f"ep{ranks}"] = plain(ep=ranks, zero=0, placements=case.experts)
        for schedule, stages_per_rank in STAGES_PER_RANK.items():
            if ranks == layout.ranks or schedule == "1f1b":
                stages = {"pp": ranks, "stages_per_rank": stages_per_rank, "schedule": schedule}
                found[f"pp{ranks}, {schedule}"] = plain(zero=0, micro_batches=2 * ranks, **stages)
    if layout.ranks % 4 == 0:
        half = layout.ranks // 2
        found[f"pp2, tp{half}"] = plain(pp=2, tp=half, zero=0, micro_batches=4, schedule="1f1b")
    return found | dict(case.strategies(layout.ranks))


def chosen_name(share: float | None) -> str:
    """Return the name of the chosen plan under a cap, a share of the memory of `REPLICATED`."""
    return CHOSEN if share is None else f"{CHOSEN} under {share:g}"
