"""`Strategy`: what the user fixes of how a model is trained."""

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
"""Axes that are searched, by name. Under pipelines a rank has only its own stages: torch's
`clip_grad_norm_` would take the norm of these alone, so a script has to ask for them. One axis of
tp may do what cp and ep do."""

MESH = ("cp", "tp", "ep")
"""The axes that a model may be partitioned along, outermost first; behind that of the data, which
is behind that of the stages."""

ORDER = ("tp", "cp", "ep")
"""The order in which it is partitioned along them, and so in which parameters are cut."""

Pin = Shard | Replicate
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]


@dataclass(frozen=True)
class Strategy:
    """What the user fixes; None is searched.

    Attributes:
        zero: ZeRO stage of every block, or a mapping of block names to stages.
        recompute: which activations the backward computes again.
        gather_bytes: size of buckets of gathered parameters, in bytes.
        reduce_bytes: size of buckets of gradients, in bytes.
        prefetch: how many buckets of parameters are gathered ahead; None to schedule each.
        activation_bytes: bytes of activations that may be kept for the backward; blocks are
            computed again as far as that needs.
        batch_semantics: "global" for the step that one device would make of the whole batch;
            "local" for DistributedDataParallel's: each rank computes what it would of its own rows
            alone (losses, batch norm, whatever couples rows), and gradients are averaged.
        tp: over how many ranks the model itself is partitioned; None and 1 for not at all.
        cp: the same, but parameters stay whole on each of these ranks: only activations are
            divided.
        ep: the same as tp, over ranks that stand closer together: tp and ep of one model multiply.
        pp: over how many ranks the forward is cut into stages; None and 1 for not at all.
        micro_batches: into how many parts a rank's rows are cut, which pass one after the other.
        schedule: the order in which they do: "gpipe", "1f1b", "interleaved" or "zero_bubble".
        stages_per_rank: how many stages a rank runs: more than one with "interleaved".
        cuts: names of modules or parameters, by the first use of which each next stage begins.
        dp_shard: over how many neighbouring data-parallel ranks ZeRO shards; the others hold copies
            of the shards. None for all of them.
        hierarchical: whether large messages go within nodes first, then between: always, never, or
            (None) where the cluster's curves say that it pays; or always, a number being that of
            neighbours that are near each other.
        compress: how gradients are compressed on their way, such as "int8" or "powersgd(rank=2)";
            "none" for not at all, which None means unless `compile(lossy=...)` allows some.
        compress_gathers: the same for gathered parameters: "bf16", "fp16" or "int8".
        compress_activations: the same for what travels between parts of a model partitioned along
            tp, cp or ep, and between stages: "bf16" or "fp16".
        lossy: methods that the planner may choose to compress gradients by, where `compress` leaves
            it open: `compile(lossy=...)` says the same.
        search: of "pp", "tp", "cp", "ep" and "dp_shard" those that the planner may use, and how
            far, where they are None. One axis of tp may do what cp and ep do; dp_shard is what is
            left of a node.
        placements: where parameters must lie, by pattern of their names: along tp, or ep if there
            is no tp; or a mapping of these axes to where they must lie along each.
        as_placed: whether parameters named there are used as they lie, never gathered.
        sequence: whether activations that are whole may be cut, and partial sums scattered, as in
            Megatron's sequence parallelism; otherwise only parameters divide what is computed.
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
                "schedule and cuts are those of a pipeline: give Strategy(pp=...) too"
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
        """This strategy with the methods that may be chosen; True for those of `MILD`."""
        if isinstance(lossy, str):
            raise StrategyError(f"lossy={lossy!r}: give True, False, or a list of methods")
        methods = MILD if lossy is True else tuple(lossy or ())
        return replace(self, lossy=methods) if methods else self

    @property
    def stages(self) -> int:
        """Into how many stages the forward is cut."""
        several = self.stages_per_rank or (2 if self.schedule == "interleaved" else 1)
        return (self.pp or 1) * several

    @property
    def pipelined(self) -> bool:
        """Whether micro-batches pass one after the other, through stages or not."""
        return self.stages > 1 or self.micro_batches is not None

    @property
    def axes(self) -> dict[str, int]:
        """The axes that the model itself is partitioned along, in that order, and their sizes."""
        return {axis: n for axis in ORDER if (n := getattr(self, axis) or 1) > 1}

    @property
    def model_parallel_size(self) -> int:
        """Over how many ranks the model itself is partitioned."""
        return prod(self.axes.values())

    @property
    def pp_size(self) -> int:
        """Over how many ranks the stages lie."""
        return self.pp or 1

    def mesh(self, world_size: int) -> tuple[tuple[str, int], ...]:
        """The axes of stages, if any, of the data, and of the model, outermost first.

        Args:
            world_size: number of ranks.

        Raises:
            StrategyError: the axes do not divide it.
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
        """Where parameters must lie along an axis, by pattern of their names."""
        if axis == "cp":
            return {escape(name): Replicate() for name in parameters}
        return {pattern: pin for pattern, along, pin in self._pins() if along == axis}

    def _pins(self) -> Iterator[tuple[str, str, Pin]]:
        """Pattern, axis and placement of each pin."""
        first = "ep" if "ep" in self.axes and "tp" not in self.axes else "tp"
        for pattern, where in self.placements.items():
            along = where if isinstance(where, Mapping) else {first: where}
            yield from ((pattern, axis, pin) for axis, pin in along.items())

    @staticmethod
    def of(strategy: str | Strategy) -> Strategy:
        """The strategy behind a name that users know."""
        if isinstance(strategy, Strategy):
            return strategy
        choice("strategy", strategy, (*SEARCHED, *ZERO_OF_NAME), ", or give a Strategy")
        if strategy in SEARCHED:
            return Strategy(search=SEARCHED[strategy])
        return Strategy(zero=ZERO_OF_NAME[strategy])
