"""`Decisions`: what the ranks of a plan do."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated

import msgspec
from torch import nn

from autopar.core.common.documents import Amount, Count, Positive, Ranks, as_text
from autopar.core.ir.graph import ParameterInfo
from autopar.core.ir.mesh_levels import DATA_AXIS, Levels
from autopar.core.ir.placement import Placement
from autopar.core.plan.buckets import Buckets
from autopar.core.plan.compression import Compressions
from autopar.core.plan.outer import PlannedSteps
from autopar.core.plan.overlap import Overlap
from autopar.core.plan.partition import Partition
from autopar.core.plan.pipeline import Pipeline
from autopar.core.plan.recompute import Level
from autopar.errors import PlanError

if TYPE_CHECKING:
    from autopar.core.plan.plan import Plan

ZeroStage = Annotated[int, msgspec.Meta(ge=0, le=3)]
GlobalOrLocal = Annotated[str, msgspec.Meta(pattern="^(global|local)$")]


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """Choices of a plan that ranks carry out. Passes read nothing else of it.

    Attributes:
        fingerprint: hash of the names, shapes and dtypes of its parameters.
        world_size: number of ranks.
        mesh: names and sizes of the mesh axes, outermost first.
        zero_stages: ZeRO stage of each block; "" for everything outside of blocks.
        batch: batch that each rank receives: "global" or "local".
        buckets: parameters that share one collective.
        bucket_bytes: bytes of gather and reduction buckets that ranks fill themselves; replaces
            `buckets` if present.
        compressions: lossy compression of each bucket.
        levels: levels of axes that span several nodes, and their hierarchical collectives.
        hybrid: whether ZeRO shards over the inner level of the data axis only, and replicates
            shards over the outer level.
        prefetch: number of parameter buckets gathered ahead.
        in_flight: maximum number of reductions in flight; 0 for no limit.
        overlaps: start and wait of each collective, by pipeline stage; replaces `prefetch` and
            `in_flight` if present.
        recompute: checkpointing level of each block.
        offload: blocks whose saved activations lie on a lower level of memory; "" for everything
            outside of blocks.
        offload_parameters: whether parameters lie there between their uses.
        offload_dir: folder on the storage of each rank; "" for host memory under GPUs.
        activation_bytes: limit of saved activations, in bytes; None for no limit.
        batch_semantics: "global" for the step of one device on the whole batch; "local" for
            losses of each rank's own rows, with averaged gradients.
        local_steps: steps that groups of ranks take apart, each under this plan, and their number;
            None if all ranks follow it together.
        precision: dtype of autocast, or None.
        reduce_precision: dtype in which gradients are reduced; None for that of their parameters.
        placements: placement of each parameter along the data axis between steps.
        row_shares: share of the batch's rows of each data-parallel rank; () for equal ones.
        changed: frozen parameters that the forward changes; replicated like buffers.
        partitions: partition of the model along each model-parallel axis, in this order.
        pipeline: pipeline stages and their schedule; None without a pipeline.
        parameter_bytes: size of each unsharded parameter, in bytes.
        loss_chunks: number of chunks of rows in which logits and their loss are computed.
    """

    fingerprint: str
    world_size: Ranks
    mesh: tuple[tuple[str, Ranks], ...]
    zero_stages: tuple[tuple[str, ZeroStage], ...]
    batch: GlobalOrLocal = "global"
    buckets: Buckets = field(default_factory=Buckets)
    bucket_bytes: tuple[Positive, ...] = ()
    compressions: Compressions = field(default_factory=Compressions)
    levels: tuple[Levels, ...] = ()
    hybrid: bool = False
    prefetch: Count = 1
    in_flight: Count = 0
    overlaps: tuple[Overlap, ...] = ()
    recompute: tuple[tuple[str, Level], ...] = ()
    offload: tuple[str, ...] = ()
    offload_parameters: bool = False
    offload_dir: str = ""
    activation_bytes: Count | None = None
    batch_semantics: GlobalOrLocal = "global"
    local_steps: PlannedSteps | None = None
    precision: str | None = None
    reduce_precision: str | None = None
    placements: tuple[tuple[str, Placement], ...] = ()
    row_shares: tuple[Amount, ...] = ()
    changed: tuple[str, ...] = ()
    partitions: tuple[Partition, ...] = ()
    pipeline: Pipeline | None = None
    parameter_bytes: tuple[tuple[str, Count], ...] = ()
    loss_chunks: Positive = 1

    @property
    def dp_size(self) -> int:
        """Number of data-parallel ranks."""
        return dict(self.mesh)[DATA_AXIS]

    @property
    def pp_size(self) -> int:
        """Number of pipeline ranks."""
        return dict(self.mesh).get("pp", 1)

    @property
    def model_parallel_size(self) -> int:
        """Number of model-parallel ranks: the product of tp, cp and ep."""
        return self.world_size // self.dp_size // self.pp_size

    def digest(self) -> str:
        """Hash of all decisions; must be equal on all ranks."""
        return hashlib.sha256(as_text(decisions_of(self)).encode()).hexdigest()[:16]


def decisions_of(plan: Decisions) -> Decisions:
    """The decisions alone of a plan: all that its ranks do, whatever it says about it."""
    return Decisions(**{each.name: getattr(plan, each.name) for each in fields(Decisions)})


def check_plan(
    plan: Plan, model: nn.Module, parameters: Iterable[ParameterInfo], world_size: int
) -> None:
    """Checks that a plan fits a model.

    Raises:
        PlanError: The plan was made for another model or number of ranks.
    """
    ours = fingerprint(parameters := list(parameters))
    if plan.world_size != world_size:
        raise PlanError(
            f"the plan is for {plan.world_size} ranks, but {world_size} are running. "
            f"Plan for {world_size} (autopar plan --world-size {world_size}), or launch "
            f"{plan.world_size}."
        )
    if plan.fingerprint != ours:
        sizes = dict(plan.parameter_bytes)
        names = {p.name: p.bytes for p in parameters}
        changed = [n for n in {**sizes, **names} if sizes.get(n) != names.get(n)]
        detail = ", ".join(sorted(changed)[:5]) or "order or dtype of parameters"
        ours = type(model).__name__
        kind = f"{plan.model}, not {ours}" if ours != plan.model else f"a {ours} of other sizes"
        raise PlanError(
            f"the plan was made for another model ({kind}); they differ in: {detail}. "
            "Plan again with autopar.plan(model, ...)."
        )


def fingerprint(parameters: Iterable[ParameterInfo]) -> str:
    """Hash of the names, shapes, dtypes and roles of a model's parameters."""
    lines = [f"{p.name} {p.shape} {p.dtype} {p.requires_grad}" for p in parameters]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
