"""`Layout`: mesh and placements of the parameters of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from autopar.core.common.checks import count
from autopar.core.ir.graph import ParameterInfo
from autopar.core.ir.mesh_levels import (
    DATA_AXIS,
    DATA_STORAGE_AXES,
    INTER_NODE,
    INTRA_NODE,
    level,
)
from autopar.core.ir.placement import Placement, Replicate, Shard, chunk_of
from autopar.core.plan.decisions import Decisions
from autopar.core.plan.partition import REPLICATED_OVER


@dataclass(frozen=True)
class Layout:
    """Mesh and placements of the parameters of a plan."""

    decisions: Decisions

    @property
    def shards_parameters(self) -> bool:
        """Whether some parameter is sharded between steps."""
        sharded = self.decisions.dp_size > 1 and any(
            stage for _, stage in self.decisions.zero_stages
        )
        return sharded or any(partition.stored for partition in self.decisions.partitions)

    @property
    def replicas(self) -> int:
        """Number of ranks that hold the same dense parameters, unless ZeRO shards them."""
        sizes = dict(self.decisions.mesh)
        return self.decisions.dp_size * prod(sizes.get(axis, 1) for axis in REPLICATED_OVER)

    @property
    def interleaves(self) -> bool:
        """Whether some parameter has an interleaved shard placement."""
        placements = (p for each in self.decisions.partitions for p in each.stored.values())
        return any(isinstance(p, Shard) and p.interleave > 1 for p in placements)

    @property
    def axes(self) -> dict[str, int]:
        """Sizes of the mesh axes and of their levels."""
        mesh, levels = dict(self.decisions.mesh), self.decisions.levels
        return mesh | {k: n for own in levels for k, n in own.sizes(mesh[own.axis]).items()}

    @property
    def shard_axis(self) -> str:
        """Axis or level that ZeRO shards parameters over."""
        return level(DATA_AXIS, INTRA_NODE) if self.decisions.hybrid else DATA_AXIS

    @property
    def shard_ranks(self) -> int:
        """Number of ranks that ZeRO shards parameters over."""
        return self.axes[self.shard_axis]

    def model_parallel_shape(
        self, info: ParameterInfo, coordinate: Mapping[str, int] | None = None
    ) -> list[int]:
        """Shape of a parameter on a rank of tp, cp and ep; by default the largest.

        ZeRO divides it further over the data axis.
        """
        shape = list(info.shape)
        for partition in self.decisions.partitions:
            if isinstance(placement := partition.stored.get(info.name), Shard):
                dim, pieces = placement.dim, placement.interleave
                rank = coordinate[partition.axis] if coordinate is not None else 0
                shape[dim] = chunk_of(shape[dim] // pieces, partition.ranks, rank)[1] * pieces
        return shape

    @property
    def zero_dims(self) -> tuple[tuple[str, int], ...]:
        """Parameters that ZeRO shards on another dim than 0, and that dim."""
        placements = self.decisions.placements
        return tuple((n, p.dim) for n, p in placements if isinstance(p, Shard) and p.dim)

    @property
    def storage(self) -> tuple[tuple[str, int], ...]:
        """Mesh of the parameters, with torch's names for the levels of a hybrid data axis."""
        if not self.decisions.hybrid:
            return self.decisions.mesh
        levels = zip(DATA_STORAGE_AXES, (INTER_NODE, INTRA_NODE), strict=True)
        parts = [(name, self.axes[level(DATA_AXIS, part)]) for name, part in levels]
        own = [parts if axis == DATA_AXIS else [(axis, size)] for axis, size in self.decisions.mesh]
        return tuple(item for items in own for item in items)

    @property
    def shard_order(self) -> tuple[str, ...]:
        """Axes of `storage` in the order of sharding."""
        data = DATA_STORAGE_AXES if self.decisions.hybrid else (DATA_AXIS,)
        return (*(partition.axis for partition in self.decisions.partitions), *data)

    def coordinate(self, rank: int) -> dict[str, int]:
        """Coordinate of a rank on each axis of the mesh; the last axis varies fastest."""
        count("rank", rank, 0, self.decisions.world_size - 1)
        found = {}
        for axis, size in reversed(self.decisions.mesh):
            rank, found[axis] = divmod(rank, size)
        return found

    def parameters_on(self, rank: int) -> frozenset[str] | None:
        """Parameters of which a rank stores something; None for all."""
        pipeline = self.decisions.pipeline
        if pipeline is None or self.decisions.pp_size == 1:
            return None
        return pipeline.held(self.coordinate(rank)["pp"]) | {*self.decisions.changed}

    def share_of(self, name: str) -> float:
        """Fraction of a parameter that a rank stores between steps."""
        sizes, share = dict(self.storage), 1.0
        for axis, placement in self.of(name).items():
            share /= sizes[axis] if isinstance(placement, Shard) else 1
        return share

    def of(self, name: str) -> dict[str, Placement]:
        """Placement of a parameter between steps along each axis, in `shard_order`."""
        partitions, whole = self.decisions.partitions, Replicate()
        found: dict[str, Placement] = {
            each.axis: each.stored.get(name, whole) for each in partitions
        }
        if self.decisions.dp_size > 1 or not partitions:
            found |= dict.fromkeys(self.shard_order[len(partitions) :], whole)
            found[self.shard_order[-1]] = self._placements[name]
        return found

    @cached_property
    def _placements(self) -> dict[str, Placement]:
        return dict(self.decisions.placements)

    @property
    def unsharded_grad_params(self) -> tuple[str, ...]:
        """Parameters whose gradients are reduced once per step, not per micro-batch."""
        zero = dict(self.decisions.zero_stages)

        def block(name: str) -> str:
            inside = (b for b in zero if b and name.startswith(b + "."))
            return max(inside, key=len, default="")

        names = (name for name, _ in self.decisions.parameter_bytes)
        return tuple(name for name in names if zero.get(block(name), 0) < 2)
