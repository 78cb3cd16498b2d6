"""`build_pass_pipeline`: the passes that turn a captured graph into the program of a rank."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import zip_longest

from autopar.ir.mesh_levels import DATA_AXIS, place_on
from autopar.passes.communication.bucket_collectives import BucketCollectives
from autopar.passes.communication.bucket_tp_gradients import BucketTpGradients
from autopar.passes.communication.hierarchical_collectives import HierarchicalCollectives
from autopar.passes.communication.lower_collectives import LowerCollectives
from autopar.passes.communication.schedule_overlap import ScheduleOverlap
from autopar.passes.compression.compress_activations import CompressActivations
from autopar.passes.compression.compress_gathers import CompressGathers
from autopar.passes.compression.compress_gradients import CompressGradients
from autopar.passes.core.pass_base import Pass
from autopar.passes.core.pass_pipeline import PassPipeline
from autopar.passes.data_parallel.agree_on_batch import AgreeOnBatch
from autopar.passes.data_parallel.assign_batch_axis import AssignBatchAxis
from autopar.passes.data_parallel.shard_parameters import ShardParameters
from autopar.passes.data_parallel.synchronize_gradients import SynchronizeGradients
from autopar.passes.memory.checkpoint_activations import CheckpointActivations
from autopar.passes.memory.fuse_cross_entropy import FuseCrossEntropy
from autopar.passes.pipeline_parallel.accumulate_micro_batches import AccumulateMicroBatches
from autopar.passes.pipeline_parallel.place_stages import PlaceStages
from autopar.passes.tensor_parallel.partition_axis import PartitionAxis
from autopar.plan.partition import NodeStrategies
from autopar.plan.spec import PlanSpec

logger = logging.getLogger(__name__)


def build_pass_pipeline(
    plan: PlanSpec,
    rank: int,
    backend: str,
    *,
    op_strategies: Sequence[NodeStrategies] = (),
    hold: bool = False,
    held: tuple[str, ...] = (),
    compiled: bool = False,
    disable: Sequence[str] = (),
) -> PassPipeline:
    """The passes of a plan without pipeline stages, from the captured graph to a rank's program.

    Args:
        plan: the plan.
        rank: this rank in the world.
        backend: torch.distributed backend to lower collectives for.
        op_strategies: strategies of the nodes along each axis of `plan.partitions`, in that order;
            nodes along axes left out are replicated.
        hold: keep gradients unreduced, as under `no_sync`.
        held: parameters with unreduced gradients from earlier calls.
        compiled: whether a compiler that fuses operators follows.
        disable: names of passes to leave out, to find the one at fault.

    Raises:
        StrategyError: the graph would be wrong without a pass in `disable`.
    """
    first = build_model_pipeline(plan, rank, op_strategies=op_strategies)
    last = build_stage_pipeline(plan, rank, backend, hold=hold, held=held, compiled=compiled)
    pipeline = (first + last).without(disable)
    logger.debug("passes of rank %d under plan %s:\n%s", rank, plan.name, pipeline)
    return pipeline


def build_model_pipeline(
    plan: PlanSpec,
    rank: int,
    *,
    op_strategies: Sequence[NodeStrategies] = (),
    micro_batches: int = 1,
) -> PassPipeline:
    """The passes over the whole model, before it is split into pipeline stages.

    Args:
        plan: the plan.
        rank: this rank in the world.
        op_strategies: as in `build_pass_pipeline`.
        micro_batches: number of micro-batches of a pipeline.
    """
    place, axes = plan.mesh_coordinate(rank), [partition.axis for partition in plan.partitions]
    along = zip_longest(axes, op_strategies, fillvalue=())
    divided = [PartitionAxis(axis, place[axis], own) for axis, own in along]  # type: ignore[index,arg-type]
    several = plan.dp_size > 1
    assigned = [AssignBatchAxis(DATA_AXIS, agree=plan.pipeline is None)] if several else []
    if plan.pipeline is None:
        agree = [AgreeOnBatch(tuple(axes))] if axes else []
        return PassPipeline((*divided, *agree, *assigned))
    stages = PlaceStages(plan.pipeline.uses, plan.pipeline.stages)
    if micro_batches == 1:
        return PassPipeline((stages, *divided, *assigned))
    return PassPipeline((stages, *divided, AccumulateMicroBatches()))


def build_stage_pipeline(
    plan: PlanSpec,
    rank: int,
    backend: str,
    *,
    hold: bool = False,
    held: tuple[str, ...] = (),
    compiled: bool = False,
    accumulate: bool = False,
) -> PassPipeline:
    """The passes over the model, or over one of its pipeline stages, down to lowered collectives.

    Args:
        plan: the plan.
        rank: this rank in the world.
        backend: torch.distributed backend to lower collectives for.
        hold: keep gradients unreduced, as under `no_sync`.
        held: parameters with unreduced gradients from earlier calls.
        compiled: whether a compiler that fuses operators follows.
        accumulate: whether another micro-batch follows, so that gradients that ZeRO leaves whole
            stay unreduced.
    """
    place = plan.mesh_coordinate(rank)
    row, axes = place[DATA_AXIS], [partition.axis for partition in plan.partitions]
    fuse = () if compiled else (FuseCrossEntropy(),)
    checkpoint = CheckpointActivations(plan.recompute, plan.activation_bytes, compiled)
    sums = [
        BucketTpGradients(partition.axis, partition.bucket_bytes) for partition in plan.partitions
    ]
    narrow = plan.compressions.activations
    activations = (CompressActivations(narrow),) if narrow else ()
    overlap = ScheduleOverlap(plan.prefetch, plan.in_flight, plan.overlaps)
    last = [LowerCollectives(backend, place[axis], axis) for axis in axes]
    if plan.dp_size == 1:
        overlapped = (overlap,) if axes else ()
        return PassPipeline((*fuse, checkpoint, *sums, *activations, *overlapped, *last))
    own = place_on(plan.shard_axis, row, plan.axes)
    kept = (
        tuple(dict(plan.parameter_bytes))
        if hold
        else plan.unsharded_grad_params
        if accumulate
        else ()
    )
    return PassPipeline(
        (
            *fuse,
            checkpoint,
            *sums,
            ShardParameters(plan.shard_axis, own, plan.zero_stages),
            SynchronizeGradients(DATA_AXIS, row, kept, held, plan.shard_axis),
            BucketCollectives(plan.buckets),
            *_compression(plan, row),
            *activations,
            *(HierarchicalCollectives(own) for own in plan.levels if own.from_bytes),
            overlap,
            LowerCollectives(backend, row, DATA_AXIS),
            *last,
        )
    )


def _compression(plan: PlanSpec, row: int) -> tuple[Pass, ...]:
    """The lossy passes."""
    chosen = plan.compressions
    found: list[Pass] = []
    if any(chosen.reduce):
        found.append(CompressGradients(plan.buckets.reduce, chosen.reduce, row, plan.levels))
    if any((*chosen.gather, *chosen.regather)):
        gather = zip(plan.buckets.gather, chosen.gather, strict=True)
        regather = zip(plan.buckets.regather, chosen.regather, strict=True)
        found.append(CompressGathers(tuple(gather), tuple(regather)))
    return tuple(found)
