"""`read_plan`: reads a plan from its document, and checks all fields and their consistency."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, TypeVar

import torch

from autopar.common.checks import short_repr
from autopar.common.documents import FieldError, read
from autopar.errors import PlanError, StrategyError
from autopar.ir.mesh_levels import DATA_AXIS
from autopar.ir.placement import Replicate, Shard, placement_of
from autopar.plan.compression import Compression
from autopar.plan.overlap import Overlap
from autopar.plan.partition import parse_op_strategy
from autopar.plan.pipeline import Pipeline
from autopar.plan.prediction import Prediction
from autopar.plan.spec import SCHEMA_VERSION, PlanSpec
from autopar.plan.upgrade import upgrade_schema_6

AGAIN = "Make the plan again with autopar.plan."
P = TypeVar("P", bound=PlanSpec)
MODEL_AXES = ("tp", "cp", "ep")
KINDS = ("gather", "regather", "reduce")


def read_plan(document: Any, kind: type[P], source: str) -> P:
    """The plan in a document.

    Args:
        document: JSON values, as returned by `PlanSpec.to_dict`.
        kind: class of the plan.
        source: name of the document, for errors.

    Raises:
        PlanError: A field is unknown, missing, of another type or out of range.
    """
    found = document.get("schema_version") if isinstance(document, dict) else None
    if found == 6 and isinstance(found, int):
        try:
            document, found = upgrade_schema_6(document), SCHEMA_VERSION
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise PlanError(f"{source} is no plan of schema 6: {error!r}. {AGAIN}") from error
    if found != SCHEMA_VERSION:
        raise PlanError(
            f"{source} has plan schema {short_repr(found)} in $.schema_version; this autopar "
            f"reads 6 and {SCHEMA_VERSION}. {AGAIN}"
        )
    if missing := [f.name for f in fields(kind) if f.name not in document]:
        raise PlanError(f"{source}: $ lacks the field {missing[0]!r} of a plan. {AGAIN}")
    return read(document, kind, source, PlanError, AGAIN, check)


def check(plan: PlanSpec) -> None:
    """Checks that the fields of a plan are consistent.

    Raises:
        FieldError: Two fields contradict each other.
    """
    _check_mesh(plan)
    _check_parameters(plan)
    _check_levels(plan)
    _check_compressions(plan)
    for index, own in enumerate(plan.overlaps):
        _check_overlap(own, f"$.overlaps[{index}]")
    if plan.pipeline is not None:
        _check_pipeline(plan, plan.pipeline)
    if plan.prediction is not None:
        _check_prediction(plan, plan.prediction)
    if plan.precision is not None and not _is_floating(plan.precision):
        raise FieldError("$.precision", f"is {plan.precision!r}: expected a floating-point dtype")


def _check_mesh(plan: PlanSpec) -> None:
    known = ("pp", DATA_AXIS, *MODEL_AXES)
    _check_unique("$.mesh", (axis for axis, _ in plan.mesh))
    for index, (axis, _) in enumerate(plan.mesh):
        if axis not in known:
            raise FieldError(
                f"$.mesh[{index}][0]", f"is {axis!r}: expected one of {', '.join(known)}"
            )
    sizes = dict(plan.mesh)
    if DATA_AXIS not in sizes:
        raise FieldError("$.mesh", f"lacks {DATA_AXIS!r}, the axis of the data")
    if math.prod(sizes.values()) != plan.world_size:
        raise FieldError("$.mesh", f"is of {math.prod(sizes.values())} ranks, $.world_size is not")
    _check_unique("$.partitions", (own.axis for own in plan.partitions))
    for index, own in enumerate(plan.partitions):
        path = f"$.partitions[{index}]"
        if own.axis not in MODEL_AXES or sizes.get(own.axis) != own.ranks:
            raise FieldError(path, f"is over {own.ranks} ranks of {own.axis!r}, $.mesh is not")
        for at, (text, _) in enumerate(own.strategies):
            _check_text(
                f"{path}.strategies[{at}][0]", text, lambda text: str(parse_op_strategy(text))
            )
    if missing := sizes.keys() & set(MODEL_AXES) - {own.axis for own in plan.partitions}:
        raise FieldError("$.partitions", f"lacks the axis {min(missing)!r} of $.mesh")


def _check_parameters(plan: PlanSpec) -> None:
    names = [name for name, _ in plan.parameter_bytes]
    for field in ("parameter_bytes", "zero_stages", "recompute", "placements", "sent_bytes"):
        _check_unique(f"$.{field}", (name for name, _ in getattr(plan, field)))
    placed = {"$.placements": plan.placements}
    for index, own in enumerate(plan.partitions):
        placed[f"$.partitions[{index}].parameters"] = own.parameters
    for path, table in placed.items():
        _check_names(path, names, (name for name, _ in table))
        for index, (_, text) in enumerate(table):
            _check_placement(f"{path}[{index}][1]", text)
    if missing := set(names).difference(name for name, _ in plan.placements):
        raise FieldError("$.placements", f"lacks {min(missing)!r} of $.parameter_bytes")
    _check_unique("$.changed", plan.changed)
    _check_names("$.changed", names, plan.changed)
    sharded = {name for table in placed.values() for name, text in table if text != "R"}
    if both := sharded.intersection(plan.changed):
        raise FieldError("$.changed", f"names {min(both)!r}, which is sharded elsewhere")
    if names and "" not in dict(plan.zero_stages):
        raise FieldError("$.zero_stages", 'lacks the stage of "", all that is outside of blocks')
    _check_names("$.recompute", dict(plan.zero_stages), (block for block, _ in plan.recompute))
    for kind in KINDS:
        for index, group in enumerate(getattr(plan.buckets, kind)):
            path = f"$.buckets.{kind}[{index}]"
            if not group:
                raise FieldError(path, "is empty: expected names of parameters")
            _check_names(path, names, group)


def _check_levels(plan: PlanSpec) -> None:
    sizes = dict(plan.mesh)
    for index, own in enumerate(plan.levels):
        size = sizes.get(own.axis)
        if size is None or own.intra_node > size:
            raise FieldError(
                f"$.levels[{index}]",
                f"has {own.intra_node} ranks of {own.axis!r} together: not $.mesh",
            )
        _check_unique(f"$.levels[{index}].from_bytes", (kind for kind, _ in own.from_bytes))
    if plan.hybrid and plan.shard_axis not in plan.axes:
        raise FieldError("$.hybrid", "is true, but no $.levels divide the data's axis")


def _check_compressions(plan: PlanSpec) -> None:
    given = plan.compressions
    for kind in KINDS:
        methods, buckets = getattr(given, kind), getattr(plan.buckets, kind)
        if methods and len(methods) != len(buckets):
            raise FieldError(
                f"$.compressions.{kind}", f"has {len(methods)} methods for {len(buckets)} buckets"
            )
        for index, text in enumerate(methods):
            _check_method(f"$.compressions.{kind}[{index}]", text)
    _check_method("$.compressions.activations", given.activations)


def _check_overlap(own: Overlap, path: str) -> None:
    for kind in KINDS:
        for index, value in enumerate(getattr(own, kind)):
            if value < 0:
                raise FieldError(f"{path}.{kind}[{index}]", f"is {value}: expected at least 0")


def _check_pipeline(plan: PlanSpec, pipeline: Pipeline) -> None:
    if pipeline.ranks != plan.pp_size:
        raise FieldError(
            "$.pipeline.ranks", f"is {pipeline.ranks}, but $.mesh has {plan.pp_size} of pp"
        )
    names = [name for name, _ in plan.parameter_bytes]
    _check_names("$.pipeline.uses", names, (name for name, _ in pipeline.uses))
    for index, (_, stages) in enumerate(pipeline.uses):
        path = f"$.pipeline.uses[{index}][1]"
        if not stages or max(stages) >= pipeline.stages:
            raise FieldError(path, f"is {list(stages)}: there are {pipeline.stages} stages")
    if plan.prediction is not None and len(plan.prediction.stages) not in (0, pipeline.stages):
        raise FieldError("$.prediction.stages", f"is not of {pipeline.stages} stages")


def _check_prediction(plan: PlanSpec, prediction: Prediction) -> None:
    if prediction.stages and plan.pipeline is None:
        raise FieldError("$.prediction.stages", "is of a pipeline, but $.pipeline is null")
    for index, event in enumerate(prediction.events):
        if event[3] < event[2]:
            raise FieldError(f"$.prediction.events[{index}][3]", "is before the event starts")
    times = prediction.report_data.memory_s
    for index, (_, sizes) in enumerate(prediction.report_data.memory):
        if len(sizes) != len(times):
            raise FieldError(
                f"$.prediction.report_data.memory[{index}][1]",
                f"has {len(sizes)} sizes for {len(times)} times",
            )


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


def _check_text(path: str, text: str, again: Callable[[str], str]) -> None:
    """Raises FieldError unless parsing and printing a text gives the same text."""
    try:
        same = again(text) == text
    except ValueError:
        same = False
    if not same:
        raise FieldError(path, f"is {text!r}, which cannot be read")


def _check_placement(path: str, text: str) -> None:
    _check_text(path, text, lambda text: str(placement_of(text)))
    if not isinstance(placement_of(text), (Replicate, Shard)):
        raise FieldError(path, f"is {text!r}: a parameter is replicated, R, or sharded, as in S(0)")


def _check_method(path: str, text: str) -> None:
    try:
        Compression.of(text or "bf16")
    except StrategyError as error:
        raise FieldError(path, f"is {text!r}: {error}") from error


def _is_floating(name: str) -> bool:
    dtype = getattr(torch, name, None)
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point
