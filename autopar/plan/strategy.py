"""`Strategy`: the choices of a plan that the user fixes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from glob import escape
from math import prod
from typing import Literal

from autopar.common.checks import choice
from autopar.errors import StrategyError
from autopar.ir.mesh_levels import DATA_AXIS
from autopar.ir.placement import Replicate, Shard
from autopar.plan.compression import MILD, Compression
from autopar.plan.recompute import Level
from autopar.plan.strategy_fields import check_fields

ZERO_OF_NAME = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp": 3}
SEARCHED = {"auto": ("tp", "dp_shard"), "fastest": ("pp", "tp", "dp_shard")}
"""Axes that the planner searches, by name of the strategy. Pipelines are opt-in, because torch's
`clip_grad_norm_` sees only the gradients of a rank's own stages."""

MESH = ("cp", "tp", "ep")
"""Model-parallel axes, outermost first; pp and dp are outside of them."""

ORDER = ("tp", "cp", "ep")
"""Model-parallel axes in the order of partitioning, which is the order of sharding parameters."""

Pin = Shard | Replicate
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]


@dataclass(frozen=True)
class Strategy:
    """Choices that the user fixes; the planner searches those left at None.

    Attributes:
        zero: ZeRO stage of every block, or a mapping of block names to stages.
        recompute: level of activation checkpointing.
        gather_bytes: size of parameter buckets, in bytes.
        reduce_bytes: size of gradient buckets, in bytes.
        prefetch: number of parameter buckets gathered ahead; None to schedule each collective.
        activation_bytes: limit of activations saved for the backward, in bytes; blocks are
            checkpointed as needed.
        batch_semantics: "global" for the step of one device on the whole batch; "local" as in
            DistributedDataParallel: losses, batch norm and other operators across rows see each
            rank's own rows, and gradients are averaged.
        tp: number of tensor-parallel ranks; None and 1 for none.
        cp: number of ranks that shard activations only, with replicated parameters.
        ep: like tp, along an inner axis of closer ranks; both may be combined.
        pp: number of pipeline ranks; None and 1 for none.
        micro_batches: number of micro-batches of a rank's rows.
        schedule: pipeline schedule: "gpipe", "1f1b", "interleaved" or "zero_bubble".
        stages_per_rank: pipeline stages of a rank; more than one with "interleaved".
        split_points: modules or parameters whose first use begins the next stage.
        dp_shard: number of neighbouring data-parallel ranks that ZeRO shards over; shards are
            replicated over the others. None for all ranks.
        hierarchical: whether large collectives run within nodes first, then between nodes. None
            decides by the cluster's cost curves; a number is the number of ranks per node.
        compress: compression of gradients, such as "int8" or "powersgd(rank=2)"; "none" for none.
            None means none, unless `compile(lossy=...)` allows methods.
        compress_gathers: compression of gathered parameters: "bf16", "fp16" or "int8".
        compress_activations: compression of activations sent along tp, cp or ep and between
            stages: "bf16" or "fp16".
        lossy: methods that the planner may choose for gradients if `compress` is None; set by
            `compile(lossy=...)`.
        search: axes whose sizes the planner may choose if they are None: any of "pp", "tp", "cp",
            "ep" and "dp_shard".
        placements: placement of parameters by name pattern, along tp, or ep without tp; or a
            mapping of axes to placements.
        keep_sharded: whether parameters in `placements` are used as shards and never gathered.
        sequence_parallel: whether replicated activations may be sharded and partial sums
            reduce-scattered (sequence parallelism, arXiv:2205.05198).
    """

    zero: int | Mapping[str, int] | None = None
    recompute: Level | None = None
    gather_bytes: int | None = None
    reduce_bytes: int | None = None
    prefetch: int | None = None
    activation_bytes: int | None = None
    batch_semantics: Literal["global", "local"] = "global"
    tp: int | None = None
    cp: int | None = None
    ep: int | None = None
    pp: int | None = None
    micro_batches: int | None = None
    schedule: Schedule | None = None
    stages_per_rank: int | None = None
    split_points: tuple[str, ...] | None = None
    dp_shard: int | None = None
    hierarchical: bool | int | None = None
    compress: str | Compression | None = None
    compress_gathers: str | Compression | None = None
    compress_activations: str | Compression | None = None
    lossy: tuple[str, ...] = ()
    search: tuple[str, ...] = ()
    placements: Mapping[str, Pin | Mapping[str, Pin]] = field(default_factory=dict)
    keep_sharded: bool = False
    sequence_parallel: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        self._check_pipeline()
        pinned = {axis for _, axis, _ in self._pins()}
        if missing := sorted(pinned - ({"tp", "ep"} & set(self.axes))):
            raise StrategyError(
                f"placements are along the axes of tp and ep, but there is no {missing[0]}: give "
                f"Strategy({missing[0]}=...) too"
            )

    def _check_pipeline(self) -> None:
        if self.stages == 1 and (self.schedule or self.split_points):
            raise StrategyError(
                "schedule and split_points need a pipeline: give Strategy(pp=...) too"
            )
        several = (self.stages_per_rank or 1) > 1
        if several and self.schedule not in (None, "interleaved"):
            raise StrategyError(
                f"stages_per_rank={self.stages_per_rank} is for schedule='interleaved', not for "
                f"{self.schedule!r}"
            )
        if self.schedule == "interleaved" and self.stages_per_rank == 1:
            raise StrategyError(
                "schedule='interleaved' runs several stages on a rank: give stages_per_rank=2 or "
                "more, or leave it out"
            )
        if self.split_points is not None and len(self.split_points) != self.stages - 1:
            raise StrategyError(
                f"split_points={self.split_points!r}: {self.stages} stages have "
                f"{self.stages - 1} cuts between them"
            )

    def allowing(self, lossy: bool | Sequence[str]) -> Strategy:
        """This strategy with methods that the planner may choose for gradients; True for `MILD`."""
        if isinstance(lossy, str):
            raise StrategyError(f"lossy={lossy!r}: give True, False, or a list of methods")
        methods = MILD if lossy is True else tuple(lossy or ())
        return replace(self, lossy=methods) if methods else self

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        several = self.stages_per_rank or (2 if self.schedule == "interleaved" else 1)
        return (self.pp or 1) * several

    @property
    def pipelined(self) -> bool:
        """Whether a step consists of micro-batches, with or without several stages."""
        return self.stages > 1 or self.micro_batches is not None

    @property
    def axes(self) -> dict[str, int]:
        """Sizes of the model-parallel axes larger than 1, in `ORDER`."""
        return {axis: n for axis in ORDER if (n := getattr(self, axis) or 1) > 1}

    @property
    def model_parallel_size(self) -> int:
        """Number of model-parallel ranks: the product of tp, cp and ep."""
        return prod(self.axes.values())

    @property
    def pp_size(self) -> int:
        """Number of pipeline ranks."""
        return self.pp or 1

    def mesh(self, world_size: int) -> tuple[tuple[str, int], ...]:
        """Names and sizes of all axes, outermost first.

        Args:
            world_size: number of ranks.

        Raises:
            StrategyError: The sizes do not divide `world_size`.
        """
        model_ranks = self.model_parallel_size * (self.pp or 1)
        if world_size % model_ranks:
            every = {"pp": self.pp or 1, **self.axes}
            given = " x ".join(f"{axis}={n}" for axis, n in every.items() if n > 1)
            divisors = [n for n in range(2, world_size + 1) if world_size % n == 0]
            raise StrategyError(
                f"{given} does not divide {world_size} ranks: choose one of {divisors}"
            )
        first = [("pp", self.pp)] if self.pp and self.pp > 1 else []
        own = ((axis, self.axes[axis]) for axis in MESH if axis in self.axes)
        ranks = world_size // model_ranks
        if ranks % (self.dp_shard or 1):
            raise StrategyError(
                f"dp_shard={self.dp_shard} does not divide {ranks} ranks of the data"
            )
        return (*first, (DATA_AXIS, ranks), *own)

    def pins(self, axis: str, parameters: Iterable[str]) -> dict[str, Pin]:
        """Required placements of parameters along an axis, by name pattern."""
        if axis == "cp":
            return {escape(name): Replicate() for name in parameters}
        return {pattern: pin for pattern, along, pin in self._pins() if along == axis}

    def _pins(self) -> Iterator[tuple[str, str, Pin]]:
        """Pattern, axis and placement of each entry of `placements`."""
        first = "ep" if "ep" in self.axes and "tp" not in self.axes else "tp"
        for pattern, where in self.placements.items():
            along = where if isinstance(where, Mapping) else {first: where}
            yield from ((pattern, axis, pin) for axis, pin in along.items())

    @staticmethod
    def of(strategy: str | Strategy) -> Strategy:
        """The strategy with this name; a `Strategy` is returned unchanged."""
        if isinstance(strategy, Strategy):
            return strategy
        choice("strategy", strategy, (*SEARCHED, *ZERO_OF_NAME), ", or give a Strategy")
        if strategy in SEARCHED:
            return Strategy(search=SEARCHED[strategy])
        return Strategy(zero=ZERO_OF_NAME[strategy])
