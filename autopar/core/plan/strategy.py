"""`Strategy`: the choices of a plan that the user fixes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from glob import escape
from math import prod
from typing import Any, Literal, get_args

from autopar.core.common.checks import (
    MAX_BYTES,
    argument_error,
    choice,
    count,
    flag,
    suggests_fields,
    text,
    texts,
)
from autopar.core.ir.mesh_levels import DATA_AXIS
from autopar.core.ir.placement import Replicate, Shard
from autopar.core.plan.compression import CASTS, ELEMENTWISE, METHODS, MILD, Compression
from autopar.core.plan.outer import LocalSteps, Outer
from autopar.core.plan.pipeline import SCHEDULES
from autopar.core.plan.recompute import Level
from autopar.core.schedules import V_SCHEDULES
from autopar.errors import StrategyError

ZERO_OF_NAME = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp": 3}
SEARCHED = {"auto": ("tp", "dp_shard"), "fastest": ("pp", "tp", "dp_shard")}
"""Axes that the planner searches, by name of the strategy. Pipelines are opt-in, because torch's
`clip_grad_norm_` sees only the gradients of a rank's own stages."""

MESH = ("cp", "ep", "tp")
"""Model-parallel axes, outermost first, inside of pp and dp. Ranks of tp are the closest."""

RING_DECLINED = "ring_attention=True: attention does not go round the ranks of cp"
"""Beginning of a note of a plan, and of a warning."""

UNUSED = "nothing is worth dividing over {}: each rank of it does the same"
"""Note of a plan on an axis of `MESH` whose ranks repeat each other's work."""

ORDER = ("tp", "cp", "ep")
"""Model-parallel axes in the order of partitioning, which is the order of sharding parameters."""

SEARCHABLE = ("pp", "tp", "cp", "ep", "dp_shard")
MOST_PREFETCH = 2**16
MOST_LOSS_CHUNKS = 2**10

REDUCE_PRECISIONS = {"bf16": "bfloat16"}
"""Names of dtypes that gradients may be reduced in, other than their own."""

Pin = Shard | Replicate
Offload = Literal["none", "activations", "parameters", "activations+parameters", "auto"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dualpipe_v"]
TWO_STAGES = ("interleaved", *V_SCHEDULES)
"""Schedules with two stages on a rank, unless `stages_per_rank` gives "interleaved" more."""


@suggests_fields
@dataclass(frozen=True)
class Strategy:
    """Choices that the user fixes; the planner searches those left at None.

    Attributes:
        zero: ZeRO stage of every block, or a mapping of block names to stages.
        recompute: level of activation checkpointing.
        offload: "activations" to keep saved activations on a lower level of memory between forward
            and backward, "parameters" to keep parameters there between their uses,
            "activations+parameters" for both, "auto" to allow both where nothing cheaper fits,
            "none" or None for the ranks' own memory only.
        offload_dir: folder on the storage of each rank, for `offload`. None for host memory, which
            only GPUs have below their own; parameters of GPUs always go there.
        gather_bytes: size of parameter buckets, in bytes.
        reduce_bytes: size of gradient buckets, in bytes.
        prefetch: number of parameter buckets gathered ahead; None to schedule each collective.
        activation_bytes: limit of activations saved for the backward, in bytes; blocks are
            checkpointed as needed.
        batch_semantics: "global" for the step of one device on the whole batch; "local" as in
            DistributedDataParallel: losses, batch norm and other operators across rows see each
            rank's own rows, and gradients are averaged.
        tp: number of tensor-parallel ranks; None and 1 for none.
        cp: number of ranks that shard activations only; ZeRO shards parameters over them, too.
        ep: like tp, for experts; ranks of tp are closer to each other if both are combined.
        pp: number of pipeline ranks; None and 1 for none.
        micro_batches: number of micro-batches of a rank's rows, which may differ by a row.
        schedule: pipeline schedule: "gpipe", "1f1b", "interleaved", "zero_bubble", "zbv" or
            "dualpipe_v".
        stages_per_rank: pipeline stages of a rank: two or more with "interleaved", two with "zbv"
            and "dualpipe_v", else one.
        split_points: modules or parameters whose first use begins the next stage.
        dp_shard: number of neighbouring data-parallel ranks that ZeRO shards over; shards are
            replicated over the others. None for all ranks.
        hierarchical: whether large collectives run within nodes first, then between nodes. None
            decides by the cluster's cost curves; a number is the number of ranks per node. Tokens
            go to experts on a node once, alike.
        compress: compression of gradients, such as "int8" or "powersgd(rank=2)"; "none" for none.
            None means none, unless `compile(lossy=...)` allows methods.
        compress_gathers: compression of gathered parameters: "bf16", "fp16" or "int8".
        compress_activations: compression of activations sent along tp, cp or ep and between
            stages: "bf16" or "fp16".
        reduce_precision: "bf16" to reduce gradients over the data axis in bf16, and along tp, cp
            and ep those that autocast computes in bf16; None for the dtype of the parameters.
        lossy: methods that the planner may choose for gradients if `compress` is None; set by
            `compile(lossy=...)`.
        sync_every: optimizer steps that groups of ranks take apart before they average (local
            steps, docs/slow-links.md); None to average gradients at every step. A group is the
            ranks of a node, or those that share one model under `dp_shard`.
        outer: averaging of these groups: an `Outer`, or "local_sgd" (the default), "diloco",
            "ring", "fedavg" or "late".
        may_sync: local steps that the planner may choose if `sync_every` is None; set by
            `compile(lossy=...)`.
        search: axes whose sizes the planner may choose if they are None: any of "pp", "tp", "cp",
            "ep" and "dp_shard".
        balance: "measured" to divide the rows of the batch, or the blocks between pipeline stages,
            in proportion to the ranks' measured speeds, where they differ by more than 5 %; "even"
            for ranks that count as equal.
        placements: placement of parameters by name pattern, along tp, or ep without tp; or a
            mapping of axes to placements.
        keep_sharded: whether parameters in `placements` are used as shards and never gathered.
        sequence_parallel: whether replicated activations may be sharded and partial sums
            reduce-scattered (sequence parallelism, arXiv:2205.05198).
        loss_chunks: number of chunks of rows in which logits and their loss are computed, so that
            they are never whole; 1 for none. Outputs with logits beside a loss are then left out.
        ring_attention: whether keys and values of attention go round the ranks of cp: True for
            wherever they can, False for nowhere, None for where that is faster.
        route_experts: whether the ranks of ep send each token only to the ranks that hold its
            experts, as for `ring_attention`; otherwise they gather all tokens.
    """

    zero: int | Mapping[str, int] | None = None
    recompute: Level | None = None
    offload: Offload | None = None
    offload_dir: str | None = None
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
    reduce_precision: Literal["bf16"] | None = None
    lossy: tuple[str, ...] = ()
    sync_every: int | None = None
    outer: str | Outer | None = None
    may_sync: tuple[str, ...] = ()
    search: tuple[str, ...] = ()
    balance: Literal["measured", "even"] = "even"
    placements: Mapping[str, Pin | Mapping[str, Pin]] = field(default_factory=dict)
    keep_sharded: bool = False
    sequence_parallel: bool = True
    loss_chunks: int | None = None
    ring_attention: bool | None = None
    route_experts: bool | None = None

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            if (value := getattr(self, name)) is not None or name in _NEVER_NONE:
                check(name, value)
        if message := self._contradiction():
            raise StrategyError(message)

    def _contradiction(self) -> str | None:
        """Text on fields that contradict each other."""
        if self.stages == 1 and (self.schedule or self.split_points):
            return "schedule and split_points need a pipeline: give Strategy(pp=...) too"
        if self.schedule in V_SCHEDULES and self.stages_per_rank not in (None, 2):
            return (
                f"schedule={self.schedule!r} runs two stages on a rank: give stages_per_rank=2, "
                "or leave it out"
            )
        if (self.stages_per_rank or 1) > 1 and self.schedule not in (None, *TWO_STAGES):
            return (
                f"stages_per_rank={self.stages_per_rank} is for schedule='interleaved', not for "
                f"{self.schedule!r}"
            )
        if self.schedule == "interleaved" and self.stages_per_rank == 1:
            return (
                "schedule='interleaved' runs several stages on a rank: give stages_per_rank=2 or "
                "more, or leave it out"
            )
        compressed = self.lossy or self.compress not in (None, "none")
        if self.reduce_precision is not None and compressed:
            return "reduce_precision and compress both shrink gradients: give one of the two"
        if self.outer is not None and self.sync_every is None:
            return "outer averages groups that step apart: give sync_every=... too"
        # LocalSteps checks sync_every against outer, and raises by itself.
        _ = self.local_steps
        cuts = self.stages - 1
        if self.split_points is not None and len(self.split_points) != cuts:
            points = f"split_points={self.split_points!r}"
            return f"{points}: {self.stages} stages have {cuts} cuts between them"
        pinned = {axis for _, axis, _ in self._pins()}
        for axis in sorted(pinned - ({"tp", "ep"} & set(self.axes))):
            return (
                f"placements are along the axes of tp and ep, but there is no {axis}: give "
                f"Strategy({axis}=...) too"
            )
        return None

    def allowing(self, lossy: bool | Sequence[str]) -> Strategy:
        """This strategy with methods that the planner may choose for gradients; True for `MILD`."""
        if isinstance(lossy, str):
            raise StrategyError(f"lossy={lossy!r}: give True, False, or a list of methods")
        methods = MILD if lossy is True else tuple(lossy or ())
        local = tuple(filter(LocalSteps.named, texts("lossy", methods, "give texts")))
        rest = tuple(method for method in methods if method not in local)
        return replace(self, lossy=rest, may_sync=local) if methods else self

    @property
    def local_steps(self) -> LocalSteps | None:
        """Steps that groups of ranks take apart; None if all average gradients at every step."""
        if self.sync_every is None:
            return None
        return LocalSteps(
            self.sync_every, Outer.of("local_sgd" if self.outer is None else self.outer)
        )

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        several = self.stages_per_rank or (2 if self.schedule in TWO_STAGES else 1)
        return self.pp_size * several

    @property
    def pipelined(self) -> bool:
        """Whether a step consists of micro-batches, with or without several stages."""
        return self.stages > 1 or self.micro_batches is not None

    @property
    def offloads(self) -> bool:
        """Whether anything lies on a lower level, or may if the planner wants it."""
        return self.offload not in (None, "none")

    @property
    def stores_parameters(self) -> bool:
        """Whether parameters lie on a lower level, or may if the planner wants it."""
        return self.offload == "auto" or "parameters" in (self.offload or "")

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

        Raises:
            StrategyError: The sizes do not divide the number of ranks.
        """
        model_ranks = self.model_parallel_size * self.pp_size
        if world_size % model_ranks:
            every = {"pp": self.pp_size, **self.axes}
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


def _zero(name: str, value: Any) -> None:
    stages = value if isinstance(value, Mapping) else {"": value}
    plain = all(isinstance(s, int) and not isinstance(s, bool) for s in stages.values())
    named = all(isinstance(block, str) for block in stages)
    if not (plain and named and all(0 <= stage <= 3 for stage in stages.values())):
        wanted = "a ZeRO stage is 0, 1, 2 or 3; give one, or one for each block"
        raise argument_error(name, value, wanted)


def _split_points(name: str, value: Any) -> None:
    names = texts(name, value, "give a tuple of names of modules or parameters")
    if len(set(names)) < len(names):
        raise argument_error(name, value, "give each name once")


def _hierarchical(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        if not isinstance(value, int) or value < 2:
            wanted = "choose True, False, None or the number of neighbours, 2 or more"
            raise argument_error(name, value, wanted)
        count(name, value, 2)


def _method(allowed: tuple[str, ...]) -> Callable[[str, Any], None]:
    """Check that a compression uses one of the allowed methods."""

    def check(name: str, value: Any) -> None:
        if value == "none":
            return
        if not isinstance(value, Compression):
            text(name, value, f"choose {', '.join(allowed)}, or as in 'powersgd(rank=2)'")
        choice(name, Compression.of(value, name).method, allowed)

    return check


def _lossy(name: str, value: Any) -> None:
    for method in texts(name, value, f"give a tuple of methods: {', '.join(METHODS)}"):
        Compression.of(method, name)


def _may_sync(name: str, value: Any) -> None:
    for each in texts(name, value, "give a tuple of local steps, such as 'diloco(steps=50)'"):
        LocalSteps.of(each, "lossy")


def _search(name: str, value: Any) -> None:
    for axis in texts(name, value, f"give a tuple of axes: {', '.join(SEARCHABLE)}"):
        choice(name, axis, SEARCHABLE)


def _placements(name: str, value: Any) -> None:
    def is_pin(pin: Any) -> bool:
        if isinstance(pin, Shard):
            return type(pin.dim) is int and type(pin.interleave) is int and pin.interleave >= 1
        return isinstance(pin, Replicate)

    wanted = "give a dict of autopar.Shard(dim) or autopar.Replicate() by parameter name"
    if not isinstance(value, Mapping):
        raise argument_error(name, value, wanted)
    for pattern, where in value.items():
        for axis, pin in where.items() if isinstance(where, Mapping) else [("tp", where)]:
            if not (isinstance(pattern, str) and isinstance(axis, str) and is_pin(pin)):
                raise argument_error(name, value, wanted)


_CHECKS: Mapping[str, Callable[[str, Any], object]] = {
    "zero": _zero,
    "recompute": lambda name, value: choice(name, value, get_args(Level)),
    "offload": lambda name, value: choice(name, value, get_args(Offload)),
    "offload_dir": lambda name, value: text(name, value, "give the name of a folder"),
    "gather_bytes": lambda name, value: count(name, value, 1, MAX_BYTES),
    "reduce_bytes": lambda name, value: count(name, value, 1, MAX_BYTES),
    "prefetch": lambda name, value: count(name, value, 0, MOST_PREFETCH),
    "activation_bytes": lambda name, value: count(name, value, 0, MAX_BYTES),
    "batch_semantics": lambda name, value: choice(name, value, ("global", "local")),
    **dict.fromkeys(("tp", "cp", "ep", "pp", "micro_batches", "stages_per_rank"), count),
    "schedule": lambda name, value: choice(name, value, SCHEDULES),
    "split_points": _split_points,
    "dp_shard": count,
    "hierarchical": _hierarchical,
    "compress": _method(METHODS),
    "compress_gathers": _method(ELEMENTWISE),
    "compress_activations": _method(CASTS),
    "reduce_precision": lambda name, value: choice(name, value, REDUCE_PRECISIONS),
    "lossy": _lossy,
    "sync_every": count,
    "outer": lambda name, value: Outer.of(value),
    "may_sync": _may_sync,
    "search": _search,
    "balance": lambda name, value: choice(name, value, ("measured", "even")),
    "placements": _placements,
    "keep_sharded": flag,
    "sequence_parallel": flag,
    "loss_chunks": lambda name, value: count(name, value, 1, MOST_LOSS_CHUNKS),
    "ring_attention": flag,
    "route_experts": flag,
}
_NEVER_NONE = {
    "batch_semantics", "lossy", "may_sync", "search", "placements", "keep_sharded",
    "sequence_parallel",
}  # fmt: skip
