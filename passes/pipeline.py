"""`build_pass_pipeline`: the passes that turn a captured graph into the program of a rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from autopar.core.ir.mesh_levels import DATA_AXIS, coordinate_on
from autopar.core.plan.decisions import Decisions
from autopar.core.plan.layout import Layout
from autopar.core.plan.partition import NodeStrategies
from autopar.passes.chunks.chunk_loss import ChunkLoss
from autopar.passes.chunks.leave_out_logits import LeaveOutLogits
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
from autopar.passes.data_parallel.assign_batch_axis import AssignBatchAxis
from autopar.passes.data_parallel.cast_before_gather import CastBeforeGather
from autopar.passes.data_parallel.shard_parameters import ShardParameters
from autopar.passes.data_parallel.shard_replicated import ShardReplicated
from autopar.passes.data_parallel.synchronize_gradients import SynchronizeGradients
from autopar.passes.memory.checkpoint_activations import CheckpointActivations
from autopar.passes.memory.fuse_cross_entropy import FuseCrossEntropy
from autopar.passes.memory.lower_attention import LowerAttention
from autopar.passes.memory.offload_activations import OffloadActivations
from autopar.passes.memory.offload_parameters import OffloadParameters
from autopar.passes.pipeline_parallel.accumulate_micro_batches import AccumulateMicroBatches
from autopar.passes.pipeline_parallel.place_stages import PlaceStages
from autopar.passes.registration import with_registered
from autopar.passes.tensor_parallel.cast_before_reduce import CastBeforeReduce
from autopar.passes.tensor_parallel.partition_axis import PartitionAxis


def build_pass_pipeline(
    decisions: Decisions,
    rank: int,
    backend: str,
    *,
    op_strategies: Sequence[NodeStrategies] = (),
    micro_batches: int = 1,
    hold: bool = False,
    held: tuple[str, ...] = (),
    compiled: bool = False,
    disable: Sequence[str] = (),
) -> PassPipeline:
    """The passes of a plan without pipeline stages, from the captured graph to a rank's program.

    Args:
        decisions: what the plan decides.
        rank: this rank in the world.
        backend: torch.distributed backend to lower collectives for.
        op_strategies: strategies of the nodes along each axis of `decisions.partitions`, in that
            order; nodes along axes left out are replicated.
        micro_batches: number of micro-batches of a rank, of which the graph computes one.
        hold: keep gradients unreduced, as under `no_sync`.
        held: parameters with unreduced gradients from earlier calls.
        compiled: whether a compiler that fuses operators follows.
        disable: names of passes to leave out.

    Raises:
        StrategyError: the graph would be wrong without a pass in `disable`, or a name is unknown.
    """
    model = build_model_pipeline(
        decisions, rank, op_strategies=op_strategies, micro_batches=micro_batches
    )
    stage = build_stage_pipeline(decisions, rank, backend, hold=hold, held=held, compiled=compiled)
    return (model + stage).without(disable)


def build_model_pipeline(
    decisions: Decisions,
    rank: int,
    *,
    op_strategies: Sequence[NodeStrategies] = (),
    micro_batches: int = 1,
) -> PassPipeline:
    """The passes of `build_pass_pipeline` before the model is split into pipeline stages."""
    coordinate = Layout(decisions).coordinate(rank)
    axes = tuple(partition.axis for partition in decisions.partitions)
    once = {partition.axis: partition.once for partition in decisions.partitions}
    passes: list[Pass] = []
    if decisions.pipeline is not None:
        passes.append(PlaceStages(decisions.pipeline.uses, decisions.pipeline.stages))
    for axis, strategies in zip_longest(axes, op_strategies, fillvalue=()):
        passes.append(PartitionAxis(axis, coordinate[axis], strategies, once[axis]))  # type: ignore[index,arg-type]
    if decisions.pipeline is not None and decisions.loss_chunks > 1:
        passes.append(LeaveOutLogits())
    if micro_batches > 1:
        passes.append(AccumulateMicroBatches())
    elif decisions.dp_size > 1:
        passes.append(AssignBatchAxis(DATA_AXIS))
    return with_registered(PassPipeline(tuple(passes)), is_last=False)


def build_stage_pipeline(
    decisions: Decisions,
    rank: int,
    backend: str,
    *,
    hold: bool = False,
    held: tuple[str, ...] = (),
    compiled: bool = False,
    accumulate: bool = False,
    disable: Sequence[str] = (),
) -> PassPipeline:
    """The passes of `build_pass_pipeline` over the model, or over one of its pipeline stages.

    With `accumulate`, another micro-batch follows, so that the gradients in
    `Layout.unsharded_grad_params` stay unreduced.
    """
    coordinate = Layout(decisions).coordinate(rank)
    axes = [partition.axis for partition in decisions.partitions]
    # Attention is lowered before checkpointing, which knows expensive operators by their kernels.
    passes: list[Pass] = [LowerAttention("cuda" if backend == "nccl" else "cpu")]
    if decisions.loss_chunks > 1:
        is_alone = decisions.pipeline is None  # a stage has several micro-batches under way
        passes.append(ChunkLoss(decisions.loss_chunks, may_drop=is_alone, early=is_alone))
    passes += [] if compiled else [FuseCrossEntropy()]
    # Checkpointing precedes sharding: recomputed operators then read the copy of a parameter that
    # the backward gathers.
    passes.append(CheckpointActivations(decisions.recompute, decisions.activation_bytes, compiled))
    # A cast behind a sum would keep `BucketTpGradients` from merging it. `reduce_precision` asks
    # for the narrow sum.
    if axes and decisions.reduce_precision is None:
        passes.append(CastBeforeReduce())
    replicated = [item for item in decisions.partitions if item.zero]
    passes += (
        ShardReplicated(item.axis, coordinate[item.axis], decisions.zero_stages, item.zero_dims)
        for item in replicated
    )
    passes += (BucketTpGradients(item.axis, item.bucket_bytes) for item in decisions.partitions)
    if decisions.dp_size > 1:
        passes += _data_parallel(decisions, coordinate[DATA_AXIS], hold, held, accumulate)
    elif replicated:
        passes += (CastBeforeGather(), BucketCollectives(decisions.buckets, decisions.bucket_bytes))
    if decisions.compressions.activations:
        passes.append(CompressActivations(decisions.compressions.activations))
    passes += (HierarchicalCollectives(levels) for levels in decisions.levels if levels.from_bytes)
    if decisions.dp_size > 1:
        axes.insert(0, DATA_AXIS)
    if axes:
        # Abstract collectives move as two nodes; lowered ones have copies and views around them.
        passes.append(ScheduleOverlap(decisions.prefetch, decisions.in_flight, decisions.overlaps))
    passes += (LowerCollectives(backend, coordinate[axis], axis) for axis in axes)
    # Transfers come last: they are placed ahead of their readers in the final order.
    if decisions.offload_parameters:
        passes.append(OffloadParameters(decisions.offload_dir))
    if decisions.offload:
        passes.append(OffloadActivations(decisions.offload, decisions.offload_dir))
    return with_registered(PassPipeline(tuple(passes)), is_last=True).without(disable)


def _data_parallel(
    decisions: Decisions, dp_rank: int, hold: bool, held: tuple[str, ...], accumulate: bool
) -> Iterator[Pass]:
    layout = Layout(decisions)
    unreduced = layout.unsharded_grad_params if accumulate else ()
    if hold:
        unreduced = tuple(dict(decisions.parameter_bytes))
    shard_rank = coordinate_on(layout.shard_axis, dp_rank, layout.axes)
    yield ShardParameters(layout.shard_axis, shard_rank, decisions.zero_stages, layout.zero_dims)
    # Casts move before gathers while a gather still has a single parameter.
    yield CastBeforeGather()
    options = (unreduced, held, layout.shard_axis, decisions.reduce_precision or "")
    yield SynchronizeGradients(DATA_AXIS, dp_rank, *options)
    yield BucketCollectives(decisions.buckets, decisions.bucket_bytes)
    buckets, chosen = decisions.buckets, decisions.compressions
    if any(chosen.reduce):
        yield CompressGradients(buckets.reduce, chosen.reduce, dp_rank, decisions.levels)
    if any((*chosen.gather, *chosen.regather)):
        gather = tuple(zip(buckets.gather, chosen.gather, strict=True))
        yield CompressGathers(gather, tuple(zip(buckets.regather, chosen.regather, strict=True)))
