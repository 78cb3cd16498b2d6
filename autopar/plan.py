"""`Plan`: what was decided, as one JSON document."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from torch import nn

from autopar.checks import count, instance, shown
from autopar.compression import Compressions
from autopar.cost_model.timeline import write_trace
from autopar.documents import Amount, Count, Positive, Ranks, load, read
from autopar.errors import PlanError
from autopar.graph import ParameterInfo
from autopar.levels import BETWEEN, WITHIN, Levels, level, place_on
from autopar.partition import Partition, Ways
from autopar.passes.accumulate_micro_batches import AccumulateMicroBatches
from autopar.passes.agree_on_batch import AgreeOnBatch
from autopar.passes.base import Pass
from autopar.passes.bucket_collectives import BucketCollectives, Buckets
from autopar.passes.bucket_sums import BucketSums
from autopar.passes.checkpoint_activations import CheckpointActivations, Level
from autopar.passes.compress_activations import CompressActivations
from autopar.passes.compress_gathers import CompressGathers
from autopar.passes.compress_gradients import CompressGradients
from autopar.passes.data_parallel.assign_batch_axis import AssignBatchAxis
from autopar.passes.fuse_cross_entropy import FuseCrossEntropy
from autopar.passes.hierarchical_collectives import HierarchicalCollectives
from autopar.passes.lower_collectives import LowerCollectives
from autopar.passes.partition_axis import PartitionAxis
from autopar.passes.place_stages import PlaceStages
from autopar.passes.schedule_overlap import Overlap, ScheduleOverlap
from autopar.passes.shard_parameters import ShardParameters
from autopar.passes.synchronize_gradients import SynchronizeGradients
from autopar.pipeline import Pipeline
from autopar.placement import Placement, Replicate, Shard, placement_of
from autopar.plan_document import check
from autopar.prediction import Prediction, RunnerUp
from autopar.printable import printable

SCHEMA_VERSION = 6

ZeroStage = Annotated[int, msgspec.Meta(ge=0, le=3)]
AGAIN = "Make the plan again with autopar.plan."
GlobalOrLocal = Annotated[str, msgspec.Meta(pattern="^(global|local)$")]


@dataclass(frozen=True)
class Plan:
    """How a model is trained over the ranks.

    Attributes:
        name: the plan in a few words.
        model: class of the model.
        fingerprint: hash of the names, shapes and dtypes of its parameters.
        world_size: number of ranks.
        mesh: the axes and their sizes.
        batch: "global" or "local": what each rank is given.
        stages: ZeRO stage of each block, "" being all outside of blocks.
        buckets: parameters whose collectives travel together.
        compressions: which of these are compressed, and how: lossy.
        levels: of axes whose ranks lie over several nodes, and what is sent by level.
        hybrid: whether ZeRO shards over the inner level of the data's axis only, and keeps a copy
            of the shards at each place of the outer one.
        prefetch: buckets of parameters gathered ahead.
        in_flight: reductions under way at most; 0 for any number.
        overlaps: when collectives start and are waited for, for each stage of a pipeline; where it
            says nothing, `prefetch` and `in_flight` do.
        recompute: for each block, what its backward computes again: none, selective or full.
        activation_bytes: bytes of activations that may be kept; None for any number.
        batch_semantics: "global": the step of one device; "local": each rank computes what it
            would of its own rows alone, and gradients are averaged.
        precision: None, or the dtype of autocast.
        optimizer: name of the optimizer assumed, and bytes of its state per byte of parameter.
        optimizer_state_ratio: bytes of optimizer state per byte of parameter.
        memory_cap: bytes per rank that had to suffice; None for no cap.
        placements: how each parameter lies between steps, along the axis of the data.
        changed: frozen parameters that forward changes: whole on every rank, as buffers are.
        partitions: how the model is partitioned along the axes behind that, in this order.
        pipeline: how the model is cut into stages; None if it is not.
        parameter_bytes: size of each whole parameter.
        prediction: predicted cost; None if it was not asked for.
        sent_bytes: what a rank sends in a step over each axis, in bytes.
        runners_up: what else was considered.
        cluster: on what, and where its figures come from.
        notes: limits that the user should know.
        torch: version of torch that planned.
        schema_version: version of this document.
    """

    name: str
    model: str
    fingerprint: str
    world_size: Ranks
    mesh: tuple[tuple[str, Ranks], ...]
    stages: tuple[tuple[str, ZeroStage], ...]
    batch: GlobalOrLocal = "global"
    buckets: Buckets = field(default_factory=Buckets)
    compressions: Compressions = field(default_factory=Compressions)
    levels: tuple[Levels, ...] = ()
    hybrid: bool = False
    prefetch: Count = 1
    in_flight: Count = 0
    overlaps: tuple[Overlap, ...] = ()
    recompute: tuple[tuple[str, Level], ...] = ()
    activation_bytes: Count | None = None
    batch_semantics: GlobalOrLocal = "global"
    precision: str | None = None
    optimizer: str = "AdamW"
    optimizer_state_ratio: Amount = 2.0
    memory_cap: Positive | None = None
    placements: tuple[tuple[str, str], ...] = ()
    changed: tuple[str, ...] = ()
    partitions: tuple[Partition, ...] = ()
    pipeline: Pipeline | None = None
    parameter_bytes: tuple[tuple[str, Count], ...] = ()
    prediction: Prediction | None = None
    sent_bytes: tuple[tuple[str, Count], ...] = ()
    runners_up: tuple[RunnerUp, ...] = ()
    cluster: str = ""
    notes: tuple[str, ...] = ()
    torch: str = field(default_factory=lambda: str(torch.__version__))
    schema_version: int = SCHEMA_VERSION

    @property
    def axis(self) -> str:
        """The mesh axis over which ranks hold different rows."""
        return self._data[0]

    @property
    def data_ranks(self) -> int:
        """Over how many ranks the rows of a batch are divided."""
        return self._data[1]

    @property
    def _data(self) -> tuple[str, int]:
        return next((name, size) for name, size in self.mesh if name != "pp")

    @property
    def pipeline_ranks(self) -> int:
        """Over how many ranks the stages lie."""
        return dict(self.mesh).get("pp", 1)

    @property
    def tensor_ranks(self) -> int:
        """Over how many ranks the model itself is partitioned."""
        return self.world_size // self.data_ranks // self.pipeline_ranks

    @property
    def shards_parameters(self) -> bool:
        """Whether any rank keeps less than all parameters between steps."""
        sharded = self.data_ranks > 1 and any(stage for _, stage in self.stages)
        return sharded or any(partition.parameters for partition in self.partitions)

    @property
    def interleaves(self) -> bool:
        """Whether some parameter lies in interleaved shards."""
        lies = (p for partition in self.partitions for p in partition.layouts.values())
        return any(isinstance(p, Shard) and p.interleave > 1 for p in lies)

    @property
    def axes(self) -> dict[str, int]:
        """The sizes of the axes, and of the levels of each."""
        mesh = dict(self.mesh)
        return mesh | {k: n for own in self.levels for k, n in own.sizes(mesh[own.axis]).items()}

    @property
    def shard_axis(self) -> str:
        """The axis or level that ZeRO shards parameters over."""
        return level(self.axis, WITHIN) if self.hybrid else self.axis

    @property
    def storage(self) -> tuple[tuple[str, int], ...]:
        """The mesh that parameters lie on, with torch's names for an axis in two levels."""
        if not self.hybrid:
            return self.mesh
        names = {BETWEEN: "dp_replicate", WITHIN: "dp_shard"}
        parts = [(name, self.axes[level(self.axis, part)]) for part, name in names.items()]
        own = [parts if axis == self.axis else [(axis, size)] for axis, size in self.mesh]
        return tuple(item for items in own for item in items)

    @property
    def cuts(self) -> tuple[str, ...]:
        """The axes of `storage` in the order in which parameters are cut along them."""
        data = ("dp_replicate", "dp_shard") if self.hybrid else (self.axis,)
        return (*(partition.axis for partition in self.partitions), *data)

    def place(self, rank: int) -> dict[str, int]:
        """Where a rank of the world stands on each axis: the last one is that of neighbours."""
        count("rank", rank, 0, self.world_size - 1)
        found = {}
        for axis, size in reversed(self.mesh):
            rank, found[axis] = divmod(rank, size)
        return found

    def share_of(self, name: str) -> float:
        """The fraction of a parameter that a rank holds between steps."""
        sizes, share = dict(self.storage), 1.0
        for axis, placement in self.layout(name).items():
            share /= sizes[axis] if isinstance(placement, Shard) else 1
        return share

    def layout(self, name: str) -> dict[str, Placement]:
        """How a parameter lies between steps along each axis, in the order of cutting it."""
        whole = Replicate()
        found: dict[str, Placement] = {p.axis: p.layouts.get(name, whole) for p in self.partitions}
        if self.data_ranks > 1 or not self.partitions:
            found |= dict.fromkeys(self.cuts[len(self.partitions) :], whole)
            found[self.cuts[-1]] = placement_of(dict(self.placements)[name])
        return found

    def passes(
        self,
        rank: int,
        backend: str,
        *,
        ways: Sequence[Ways] = (),
        hold: bool = False,
        held: tuple[str, ...] = (),
        compiled: bool = False,
    ) -> tuple[Pass, ...]:
        """The passes that turn a captured graph into the program of a rank.

        Args:
            rank: this rank in the world.
            backend: the torch.distributed backend that collectives are lowered for.
            ways: of the graph before each axis that the model is partitioned along; whole along
                those that are left out.
            hold: under `no_sync`: keep gradients instead of reducing them.
            held: parameters with gradients kept from earlier calls.
            compiled: whether a compiler follows that fuses operators by itself.
        """
        first = self.model_passes(rank, ways=ways)
        last = self.stage_passes(rank, backend, hold=hold, held=held, compiled=compiled)
        return (*first, *last)

    def model_passes(
        self, rank: int, *, ways: Sequence[Ways] = (), micro_batches: int = 1
    ) -> tuple[Pass, ...]:
        """The first of the passes, which go over the whole model.

        Args:
            rank: this rank in the world.
            ways: as in `passes`.
            micro_batches: of a pipeline, into how many parts the rows of a rank are cut.
        """
        place, axes = self.place(rank), [partition.axis for partition in self.partitions]
        along = zip_longest(axes, ways, fillvalue=())
        divided = [PartitionAxis(axis, place[axis], own) for axis, own in along]  # type: ignore[index,arg-type]
        several = self.data_ranks > 1
        assigned = [AssignBatchAxis(self.axis, agree=self.pipeline is None)] if several else []
        if self.pipeline is None:
            agree = [AgreeOnBatch(tuple(axes))] if axes else []
            return (*divided, *agree, *assigned)
        stages = PlaceStages(self.pipeline.uses, self.pipeline.stages)
        if micro_batches == 1:
            return (stages, *divided, *assigned)
        return (stages, *divided, AccumulateMicroBatches())

    def stage_passes(
        self,
        rank: int,
        backend: str,
        *,
        hold: bool = False,
        held: tuple[str, ...] = (),
        compiled: bool = False,
        accumulate: bool = False,
    ) -> tuple[Pass, ...]:
        """The rest of the passes, which go over the model or over one stage of it.

        The arguments are those of `passes`.

        Args:
            rank: this rank in the world.
            backend: the torch.distributed backend that collectives are lowered for.
            hold: keep gradients instead of reducing them.
            held: parameters with gradients kept from earlier calls.
            compiled: whether a compiler follows.
            accumulate: another micro-batch follows: keep gradients that ZeRO does not divide.
        """
        place = self.place(rank)
        row, axes = place[self.axis], [partition.axis for partition in self.partitions]
        fuse = () if compiled else (FuseCrossEntropy(),)
        checkpoint = CheckpointActivations(self.recompute, self.activation_bytes, compiled)
        sums = [BucketSums(partition.axis, partition.bucket_bytes) for partition in self.partitions]
        narrow = self.compressions.activations
        activations = (CompressActivations(narrow),) if narrow else ()
        overlap = ScheduleOverlap(self.prefetch, self.in_flight, self.overlaps)
        last = [LowerCollectives(backend, place[axis], axis) for axis in axes]
        if self.data_ranks == 1:
            return (*fuse, checkpoint, *sums, *activations, *([overlap] if axes else []), *last)
        own = place_on(self.shard_axis, row, self.axes)
        kept = tuple(dict(self.parameter_bytes)) if hold else self.undivided if accumulate else ()
        return (
            *fuse,
            checkpoint,
            *sums,
            ShardParameters(self.shard_axis, own, self.stages),
            SynchronizeGradients(self.axis, row, kept, held, self.shard_axis),
            BucketCollectives(self.buckets),
            *self._compress(row),
            *activations,
            *(HierarchicalCollectives(own) for own in self.levels if own.from_bytes),
            overlap,
            LowerCollectives(backend, row, self.axis),
            *last,
        )

    def _compress(self, row: int) -> tuple[Pass, ...]:
        """The lossy passes, of a plan that has some."""
        chosen = self.compressions
        found: list[Pass] = []
        if any(chosen.reduce):
            found.append(CompressGradients(self.buckets.reduce, chosen.reduce, row, self.levels))
        if any((*chosen.gather, *chosen.regather)):
            gather = zip(self.buckets.gather, chosen.gather, strict=True)
            regather = zip(self.buckets.regather, chosen.regather, strict=True)
            found.append(CompressGathers(tuple(gather), tuple(regather)))
        return tuple(found)

    @property
    def undivided(self) -> tuple[str, ...]:
        """The parameters whose gradients ZeRO sums once a step, not once a micro-batch."""
        zero = dict(self.stages)

        def block(name: str) -> str:
            inside = (b for b in zero if b and name.startswith(b + "."))
            return max(inside, key=len, default="")

        return tuple(name for name, _ in self.parameter_bytes if zero.get(block(name), 0) < 2)

    def check(self, model: nn.Module, parameters: Iterable[ParameterInfo], world_size: int) -> None:
        """Raises PlanError if this plan was made for another model or number of ranks."""
        ours = fingerprint(parameters := list(parameters))
        if self.world_size != world_size:
            raise PlanError(
                f"the plan is for {self.world_size} ranks, but {world_size} are running. "
                "Plan again, or launch that many."
            )
        if self.fingerprint != ours:
            sizes = dict(self.parameter_bytes)
            names = {p.name: p.bytes for p in parameters}
            changed = [n for n in {**sizes, **names} if sizes.get(n) != names.get(n)]
            detail = ", ".join(sorted(changed)[:5]) or "order or dtype of parameters"
            ours = type(model).__name__
            kind = f"{self.model}, not {ours}" if ours != self.model else f"a {ours} of other sizes"
            raise PlanError(
                f"the plan was made for another model ({kind}); they differ in: {detail}. "
                "Plan again with autopar.plan(model, ...)."
            )

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON-able values."""
        return json.loads(json.dumps(asdict(self)))

    def to_json(self) -> str:
        """The plan as text; the same plan gives the same bytes."""
        return json.dumps(self.to_dict(), indent=1) + "\n"

    def digest(self) -> str:
        """Hash of all that decides what runs: equal on all ranks, or nothing may start."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON."""
        Path(path).write_text(self.to_json())

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Reads a plan that `save` wrote.

        Raises:
            PlanError: the file is not a plan, or of another schema version; names the field.
        """
        return Plan.from_dict(load(path, "plan", PlanError), str(path))

    @staticmethod
    def from_dict(document: Any, source: str = "the document") -> Plan:
        """The plan in a document of `to_dict`.

        Raises:
            PlanError: a field is unknown, missing, of another type or out of range.
        """
        found = document.get("schema_version") if isinstance(document, dict) else None
        if found != SCHEMA_VERSION:
            raise PlanError(
                f"{source} has plan schema {shown(found)} in $.schema_version; this autopar reads "
                f"{SCHEMA_VERSION}. {AGAIN}"
            )
        if missing := [f.name for f in fields(Plan) if f.name not in document]:
            raise PlanError(f"{source}: $ lacks the field {missing[0]!r} of a plan. {AGAIN}")
        return read(document, Plan, source, PlanError, AGAIN, check)

    def diff(self, other: Plan) -> str:
        """What differs between two plans, one line a field; "" if nothing does."""
        from autopar.difference import difference

        instance("other", other, Plan, "give a Plan")
        return printable("\n".join(difference(self, other)))

    def explain(self) -> str:
        """Why this plan: what bounds it, what would change it, and why each runner-up lost."""
        from autopar.explanation import explain

        return explain(self)

    def timeline(self, path: str | Path) -> None:
        """Writes the predicted step as a Chrome trace, which ui.perfetto.dev shows.

        Raises:
            PlanError: nothing was predicted, since nothing was left to choose.
        """
        from autopar.report.trace import trace

        write_trace(path, trace(self))

    def report(self, path: str | Path) -> None:
        """Writes the plan as one self-contained HTML page."""
        from autopar.report.page import page

        Path(path).write_text(page(self), encoding="utf-8")

    def __str__(self) -> str:
        from autopar.plan_text import table

        return table(self)


def fingerprint(parameters: Iterable[ParameterInfo]) -> str:
    """Hash of the names, shapes, dtypes and roles of a model's parameters."""
    lines = [f"{p.name} {p.shape} {p.dtype} {p.requires_grad}" for p in parameters]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def resized(plan: Plan, **changes: Any) -> Plan:
    """The same plan with other fields."""
    return replace(plan, **changes)
