"""`read_plan`: reads a plan from its document, and checks all fields and their consistency."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch

from autopar.core.common.checks import short_repr
from autopar.core.common.documents import FieldError, parsed, read
from autopar.core.ir.mesh_levels import DATA_AXIS, INTRA_NODE, level
from autopar.core.ir.placement import OpStrategy, Replicate, Shard
from autopar.core.plan.compression import Compression
from autopar.core.plan.layout import Layout
from autopar.core.plan.prediction import Prediction
from autopar.core.plan.strategy import REDUCE_PRECISIONS
from autopar.core.plan.upgrade import SCHEMA_VERSION, upgrade_schema_6
from autopar.core.schedules import V_SCHEDULES
from autopar.errors import PlanError, StrategyError

if TYPE_CHECKING:
    from autopar.core.plan.plan import Plan

AGAIN = "Make the plan again with autopar.plan."
MODEL_AXES = ("tp", "cp", "ep")
ADDED: dict[str, Any] = {
    "row_shares": (),
    "reduce_precision": None,
    "parameter_dtypes": [],
    "search": None,
    "bucket_bytes": [],
    "local_steps": None,
    "offload": [],
    "offload_parameters": False,
    "offload_dir": "",
    "loss_chunks": 1,
}
"""Fields that older documents of this schema lack."""

KINDS = ("gather", "regather", "reduce")


def read_plan(document: Any, kind: type[Plan], source: str) -> Plan:
    """The plan of class `kind` in JSON values that `Plan.to_dict` returned.

    Raises:
        PlanError: A field is unknown, missing, of another type or out of range.
    """
    found = document.get("schema_version") if isinstance(document, dict) else None
    if found == 6 and isinstance(found, int):  # not 6.0, which equals 6
        try:
            document, found = upgrade_schema_6(document), SCHEMA_VERSION
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise PlanError(f"{source} is no plan of schema 6: {error!r}. {AGAIN}") from error
    if found != SCHEMA_VERSION:
        raise PlanError(
            f"{source} has plan schema {short_repr(found)} in $.schema_version; this autopar "
            f"reads 6 and {SCHEMA_VERSION}. {AGAIN}"
        )
    document = ADDED | document
    if missing := [f.name for f in fields(kind) if f.name not in document]:
        raise PlanError(f"{source}: $ lacks the field {missing[0]!r} of a plan. {AGAIN}")
    try:
        document["partitions"] = _with_strategies(document["partitions"])
    except FieldError as failure:
        raise PlanError(f"{source}: {failure}. {AGAIN}") from None
    return read(document, kind, source, PlanError, AGAIN, check)


def _with_strategies(partitions: Any) -> Any:
    """The partitions of a document with values in the place of the texts of their strategies."""
    if not (isinstance(partitions, list) and all(isinstance(own, dict) for own in partitions)):
        return partitions  # msgspec says what is wrong

    # msgspec would read an OpStrategy, a dataclass, from an object only.
    def strategy(row: Any, path: str) -> Any:
        if not (isinstance(row, list) and row):
            return row
        try:
            return [parsed(OpStrategy, row[0]), *row[1:]]
        except ValueError as error:
            raise FieldError(f"{path}[0]", f"is {short_repr(row[0])}: {error}") from error

    def rows(own: dict[str, Any], path: str) -> Any:
        table = own.get("strategies", [])
        if not isinstance(table, list):
            return table
        return [strategy(row, f"{path}[{index}]") for index, row in enumerate(table)]

    return [
        own | {"strategies": rows(own, f"$.partitions[{index}].strategies")}
        for index, own in enumerate(partitions)
    ]


def check(plan: Plan) -> None:
    """Raises FieldError if two fields of a plan contradict each other."""
    for section in (_check_mesh, _check_parameters, _check_messages, _check_pipeline):
        section(plan)
    if plan.prediction is not None:
        _check_prediction(plan, plan.prediction)
    dtype = torch.float32 if plan.precision is None else getattr(torch, plan.precision, None)
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise FieldError("$.precision", f"is {plan.precision!r}: expected a floating-point dtype")
    for index, (name, _) in enumerate(plan.parameter_dtypes):
        if not isinstance(getattr(torch, name, None), torch.dtype):
            raise FieldError(f"$.parameter_dtypes[{index}][0]", f"is {name!r}: expected a dtype")
    if plan.reduce_precision not in (None, *(known := REDUCE_PRECISIONS.values())):
        wanted = f"expected null or {' or '.join(known)}"
        raise FieldError("$.reduce_precision", f"is {plan.reduce_precision!r}: {wanted}")


def _check_mesh(plan: Plan) -> None:
    sizes, known = dict(plan.mesh), ("pp", DATA_AXIS, *MODEL_AXES)
    _check_unique("$.mesh", (axis for axis, _ in plan.mesh))
    for index, (axis, _) in enumerate(plan.mesh):
        if axis not in known:
            wanted = f"expected one of {', '.join(known)}"
            raise FieldError(f"$.mesh[{index}][0]", f"is {axis!r}: {wanted}")
    if DATA_AXIS not in sizes:
        raise FieldError("$.mesh", f"lacks {DATA_AXIS!r}, the axis of the data")
    if (ranks := math.prod(sizes.values())) != plan.world_size:
        raise FieldError("$.mesh", f"is of {ranks} ranks, $.world_size is not")
    _check_unique("$.partitions", (own.axis for own in plan.partitions))
    for index, own in enumerate(plan.partitions):
        path = f"$.partitions[{index}]"
        if own.axis not in MODEL_AXES or sizes.get(own.axis) != own.ranks:
            raise FieldError(path, f"is over {own.ranks} ranks of {own.axis!r}, $.mesh is not")
    if missing := sizes.keys() & set(MODEL_AXES) - {own.axis for own in plan.partitions}:
        raise FieldError("$.partitions", f"lacks the axis {min(missing)!r} of $.mesh")


def _check_parameters(plan: Plan) -> None:
    names = [name for name, _ in plan.parameter_bytes]
    for field in ("parameter_bytes", "zero_stages", "recompute", "placements", "sent_bytes"):
        _check_unique(f"$.{field}", (name for name, _ in getattr(plan, field)))
    placed = {"$.placements": plan.placements}
    for index, own in enumerate(plan.partitions):
        placed[f"$.partitions[{index}].parameters"] = own.parameters
        placed[f"$.partitions[{index}].zero"] = own.zero
    for path, table in placed.items():
        _check_names(path, names, (name for name, _ in table))
        for index, (_, placement) in enumerate(table):
            if not isinstance(placement, (Replicate, Shard)):
                wanted = "a parameter is replicated, R, or sharded, as in S(0)"
                raise FieldError(f"{path}[{index}][1]", f"is {str(placement)!r}: {wanted}")
    if missing := set(names).difference(name for name, _ in plan.placements):
        raise FieldError("$.placements", f"lacks {min(missing)!r} of $.parameter_bytes")
    if plan.row_shares and (len(plan.row_shares) != plan.dp_size or min(plan.row_shares) <= 0):
        raise FieldError("$.row_shares", f"must be {plan.dp_size} positive shares, or none")
    _check_unique("$.changed", plan.changed)
    _check_names("$.changed", names, plan.changed)
    sharded = {n for table in placed.values() for n, p in table if isinstance(p, Shard)}
    if both := sharded.intersection(plan.changed):
        raise FieldError("$.changed", f"names {min(both)!r}, which is sharded elsewhere")
    if names and "" not in dict(plan.zero_stages):
        raise FieldError("$.zero_stages", 'lacks the stage of "", all that is outside of blocks')
    _check_names("$.recompute", dict(plan.zero_stages), (block for block, _ in plan.recompute))
    _check_unique("$.offload", plan.offload)
    _check_names("$.offload", dict(plan.zero_stages), plan.offload)
    for kind in KINDS:
        for index, group in enumerate(getattr(plan.buckets, kind)):
            path = f"$.buckets.{kind}[{index}]"
            if not group:
                raise FieldError(path, "is empty: expected names of parameters")
            _check_names(path, names, group)


def _check_messages(plan: Plan) -> None:
    """Checks levels, compressions and overlaps."""
    sizes = dict(plan.mesh)
    for index, own in enumerate(plan.levels):
        if own.intra_node > sizes.get(own.axis, 0):
            together = f"has {own.intra_node} ranks of {own.axis!r} together: not $.mesh"
            raise FieldError(f"$.levels[{index}]", together)
        _check_unique(f"$.levels[{index}].from_bytes", (kind for kind, _ in own.from_bytes))
    layout = Layout(plan)
    for index, part in enumerate(plan.partitions):
        if part.once > 1 and layout.axes.get(level(part.axis, INTRA_NODE)) != part.once:
            apart = f"is {part.once}, but no $.levels have nodes of as many ranks"
            raise FieldError(f"$.partitions[{index}].once", apart)
    if plan.hybrid and layout.shard_axis not in layout.axes:
        raise FieldError("$.hybrid", "is true, but no $.levels divide the data's axis")
    if len(plan.bucket_bytes) not in (0, 2):
        raise FieldError("$.bucket_bytes", "is neither empty nor of gathers and reductions")
    path = "$.compressions"
    for kind in KINDS:
        methods, buckets = getattr(plan.compressions, kind), getattr(plan.buckets, kind)
        if methods and len(methods) != len(buckets):
            sizes_differ = f"has {len(methods)} methods for {len(buckets)} buckets"
            raise FieldError(f"{path}.{kind}", sizes_differ)
        for index, text in enumerate(methods):
            _check_method(f"{path}.{kind}[{index}]", text)
    _check_method(f"{path}.activations", plan.compressions.activations)
    for index, overlap in enumerate(plan.overlaps):
        for kind in KINDS:
            for at, value in enumerate(getattr(overlap, kind)):
                if value < 0:
                    path = f"$.overlaps[{index}].{kind}[{at}]"
                    raise FieldError(path, f"is {value}: expected at least 0")


def _check_pipeline(plan: Plan) -> None:
    if (own := plan.pipeline) is None:
        return
    if own.ranks != plan.pp_size:
        raise FieldError("$.pipeline.ranks", f"is {own.ranks}, but $.mesh has {plan.pp_size} of pp")
    if own.schedule in V_SCHEDULES and own.stages_per_rank != 2:
        path = "$.pipeline.stages_per_rank"
        raise FieldError(path, f"is {own.stages_per_rank}: {own.schedule} has 2 stages on a rank")
    names = [name for name, _ in plan.parameter_bytes]
    _check_names("$.pipeline.uses", names, (name for name, _ in own.uses))
    for index, (_, stages) in enumerate(own.uses):
        if not stages or max(stages) >= own.stages:
            path = f"$.pipeline.uses[{index}][1]"
            raise FieldError(path, f"is {list(stages)}: there are {own.stages} stages")
    if plan.prediction is not None and len(plan.prediction.stages) not in (0, own.stages):
        raise FieldError("$.prediction.stages", f"is not of {own.stages} stages")


def _check_prediction(plan: Plan, prediction: Prediction) -> None:
    if prediction.stages and plan.pipeline is None:
        raise FieldError("$.prediction.stages", "is of a pipeline, but $.pipeline is null")
    for index, event in enumerate(prediction.events):
        if event[3] < event[2]:
            raise FieldError(f"$.prediction.events[{index}][3]", "is before the event starts")
    data = prediction.report_data
    for index, (_, sizes) in enumerate(data.memory):
        if len(sizes) != len(data.memory_s):
            path = f"$.prediction.report_data.memory[{index}][1]"
            raise FieldError(path, f"has {len(sizes)} sizes for {len(data.memory_s)} times")


def _check_unique(path: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for index, name in enumerate(names):
        if name in seen:
            raise FieldError(f"{path}[{index}]", f"names {name!r} a second time")
        seen.add(name)


def _check_names(path: str, known: Iterable[str], names: Iterable[str]) -> None:
    allowed = frozenset(known)
    for index, name in enumerate(names):
        if name not in allowed:
            raise FieldError(f"{path}[{index}]", f"names {name!r}, which this plan does not know")


def _check_method(path: str, text: str) -> None:
    try:
        Compression.of(text or "bf16")
    except StrategyError as error:
        raise FieldError(path, f"is {text!r}: {error}") from error
