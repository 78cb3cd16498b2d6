"""`PlanSpec`: the decisions of a plan, stored as one JSON document."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from torch import nn

from autopar.common.documents import Amount, Count, Positive, Ranks, write_text
from autopar.errors import PlanError
from autopar.ir.graph import ParameterInfo
from autopar.ir.mesh_levels import (
    DATA_AXIS,
    Levels,
)
from autopar.plan.buckets import Buckets
from autopar.plan.compression import Compressions
from autopar.plan.outer import PlannedSteps
from autopar.plan.overlap import Overlap
from autopar.plan.partition import Partition
from autopar.plan.pipeline import Pipeline
from autopar.plan.prediction import Prediction, RunnerUp
from autopar.plan.recompute import Level
from autopar.plan.search_outcome import SearchOutcome

SCHEMA_VERSION = 7

_NOT_RUN = (
    "name", "model", "optimizer", "optimizer_state_ratio", "memory_cap", "prediction",
    "parameter_dtypes", "sent_bytes", "runners_up", "search", "cluster", "comm_backend", "notes",
    "torch", "offload_dir",
)  # fmt: skip
"""Fields that only describe a plan; `PlanSpec.digest` ignores them."""

ZeroStage = Annotated[int, msgspec.Meta(ge=0, le=3)]
GlobalOrLocal = Annotated[str, msgspec.Meta(pattern="^(global|local)$")]


@dataclass(frozen=True)
class PlanSpec:
    """Decisions of a plan for distributed training of a model.

    Attributes:
        name: short description.
        model: class name of the model.
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
        optimizer: name of the assumed optimizer.
        optimizer_state_ratio: bytes of optimizer state per byte of parameter.
        memory_cap: memory limit of a rank, in bytes; None for no limit.
        placements: placement of each parameter along the data axis between steps.
        row_shares: share of the batch's rows of each data-parallel rank; () for equal ones.
        changed: frozen parameters that the forward changes; replicated like buffers.
        partitions: partition of the model along each model-parallel axis, in this order.
        pipeline: pipeline stages and their schedule; None without a pipeline.
        parameter_bytes: size of each unsharded parameter, in bytes.
        parameter_dtypes: bytes of unsharded parameters of each dtype, the largest first; () if
            unknown.
        prediction: predicted cost; None if the plan was not simulated.
        sent_bytes: bytes that a rank sends over each axis in a step.
        runners_up: other plans and their predicted cost.
        search: extent of the search, its bound and torch's best; None without a prediction.
        cluster: name of the cluster, and the source of its figures.
        comm_backend: backend of torch.distributed that the plan is priced on.
        notes: limitations to show to the user.
        torch: version of torch that made the plan.
        schema_version: version of the document.
    """

    name: str
    model: str
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
    optimizer: str = "AdamW"
    optimizer_state_ratio: Amount = 2.0
    memory_cap: Positive | None = None
    placements: tuple[tuple[str, str], ...] = ()
    row_shares: tuple[Amount, ...] = ()
    changed: tuple[str, ...] = ()
    partitions: tuple[Partition, ...] = ()
    pipeline: Pipeline | None = None
    parameter_bytes: tuple[tuple[str, Count], ...] = ()
    parameter_dtypes: tuple[tuple[str, Count], ...] = ()
    prediction: Prediction | None = None
    sent_bytes: tuple[tuple[str, Count], ...] = ()
    runners_up: tuple[RunnerUp, ...] = ()
    search: SearchOutcome | None = None
    cluster: str = ""
    comm_backend: str = "gloo"
    notes: tuple[str, ...] = ()
    torch: str = field(default_factory=lambda: str(torch.__version__))
    schema_version: int = SCHEMA_VERSION

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

    def to_dict(self) -> dict[str, Any]:
        """Values that JSON can store."""
        return json.loads(json.dumps(asdict(self)))

    def to_json(self) -> str:
        """JSON text; equal plans give equal bytes."""
        return json.dumps(self.to_dict(), indent=1) + "\n"

    def digest(self) -> str:
        """Hash of the fields that affect execution; must be equal on all ranks."""
        decisive = {k: value for k, value in self.to_dict().items() if k not in _NOT_RUN}
        return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()[:16]

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON.

        Raises:
            PlanError: the file cannot be written.
        """
        write_text(path, self.to_json(), PlanError)


def check_plan(
    plan: PlanSpec, model: nn.Module, parameters: Iterable[ParameterInfo], world_size: int
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
