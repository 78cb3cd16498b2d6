"""Redistributions: steps that bring a tensor from one placement to another.

Chunks of a dim that the ranks do not divide are sent at the size of the largest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from autopar.core.ir.placement import Partial, Placement, Replicate, Routed, Shard

Kind = Literal[
    "all_gather", "all_reduce", "reduce_scatter", "all_to_all", "slice", "keep_first", "route",
    "route_back",
]  # fmt: skip

ROUTES = ("route", "route_back")
"""Steps that send rows to the ranks of their experts, and back, by an uneven all-to-all."""


@dataclass(frozen=True)
class RedistributeStep:
    """One step of a redistribution: a collective, or a local operation of each rank."""

    kind: Kind
    before: Placement
    after: Placement

    @property
    def collective(self) -> str | None:
        """The collective of the step, None if it is local."""
        if self.kind in ROUTES:
            return "all_to_all"
        return None if self.kind in ("slice", "keep_first") else self.kind

    def message_bytes(self, shape: Sequence[int], item: int, ranks: int) -> int:
        """The message size in bytes, as `cost_model.collectives` defines it.

        Args:
            shape: shape of the whole tensor.
            item: size of an element in bytes.
            ranks: size of the axis.
        """
        whole = math.prod(self.padded(shape, ranks)) * item
        return whole // ranks if self.collective == "all_to_all" else whole

    def padded(self, shape: Sequence[int], ranks: int) -> list[int]:
        """The whole shape with every chunk padded to the largest."""
        padded = list(shape)
        for shard in self.shards:
            padded[shard.dim] += -padded[shard.dim] % ranks
        return padded

    @property
    def shards(self) -> list[Shard]:
        """The sharded placements before and after the step."""
        return [p for p in (self.before, self.after) if isinstance(p, Shard)]

    def copied_elements(self, shape: Sequence[int], ranks: int) -> int:
        """The number of elements read and written beside its collective, which runs over dim 0."""
        whole = math.prod(self.padded(shape, ranks))
        part, padded = whole // ranks, whole > math.prod(shape)
        copies = sum(not _in_front(shape, shard) for shard in self.shards)
        match self.kind:
            case "all_gather":
                return 2 * (whole * copies + part * padded * (1 + copies))
            case "reduce_scatter":
                return 2 * (whole * max(copies, padded) + part * padded * copies)
            case "all_to_all":
                return 2 * part * (copies + 2 * padded)
            case "route" | "route_back":
                return 2 * part
            case "slice":
                return 2 * part * copies
            case "keep_first":
                return 2 * whole
        return 0


def _in_front(shape: Sequence[int], shard: Shard) -> bool:
    """Whether the chunks of a dim are contiguous in memory, one after the other."""
    return math.prod(shape[: shard.dim]) == 1 and shard.interleave == 1


def redistribute_steps(before: Placement, after: Placement) -> tuple[RedistributeStep, ...] | None:
    """The steps from one placement to another; empty if they are equal, None if impossible."""
    if before == after:
        return ()
    kinds: list[Kind]
    match before, after:
        # Rows are routed from shards of dim 0, whatever lies before or behind these.
        case Routed(), Partial():
            return None
        case Routed(), _:
            shard = Shard(0, before.interleave)
            back = RedistributeStep("route_back", before, shard)
            behind = redistribute_steps(shard, after)
            return None if behind is None else (back, *behind)
        case _, Routed():
            shard = Shard(0, after.interleave)
            front = redistribute_steps(before, shard)
            return None if front is None else (*front, RedistributeStep("route", shard, after))
        case Shard(), Replicate():
            kinds = ["all_gather"]
        case Partial(), Replicate():
            kinds = ["all_reduce"]
        case Partial("sum"), Shard():
            kinds = ["reduce_scatter"]
        # A reduce-scatter only sums, so a maximum is reduced whole and then sliced.
        case Partial(), Shard():
            kinds = ["all_reduce", "slice"]
        case Shard(), Shard() if before.dim != after.dim:
            kinds = ["all_to_all"]
        case Shard(), Shard():
            kinds = ["all_gather", "slice"]
        case Replicate(), Shard():
            kinds = ["slice"]
        case Replicate(), Partial("sum"):
            kinds = ["keep_first"]
        case Shard(), Partial("sum"):
            kinds = ["all_gather", "keep_first"]
        case _:
            return None
    stops = [before, *(Replicate() for _ in kinds[1:]), after]
    return tuple(RedistributeStep(*step) for step in zip(kinds, stops, stops[1:], strict=False))
