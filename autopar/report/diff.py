"""`diff_lines`: differences between two plans, one line per field."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from autopar.core.ir.placement import Placement, Replicate
from autopar.formatting import duration, human_bytes

if TYPE_CHECKING:
    from autopar.core.plan.buckets import Buckets
    from autopar.core.plan.compression import Compressions
    from autopar.core.plan.partition import Partition
    from autopar.core.plan.pipeline import Pipeline
    from autopar.core.plan.plan import Plan
    from autopar.core.plan.prediction import Prediction

NAMED = 3
"""Number of names listed for one change."""


def diff_lines(one: Plan, other: Plan) -> list[str]:
    """One line per different field, in the order of the fields."""
    found = []
    for name in (field.name for field in fields(one)):
        before, after = getattr(one, name), getattr(other, name)
        if before != after and (text := _TEXTS.get(name, _values)(before, after)):
            found.append(f"{name}: {text}")
    return found


def _values(before: Any, after: Any) -> str:
    texts = str(before), str(after)
    return " -> ".join(text if len(text) <= 80 else text[:77] + "..." for text in texts)


def _tables(before: Iterable[tuple[str, Any]], after: Iterable[tuple[str, Any]]) -> str:
    """Changed names, grouped by equal change."""
    first, second = dict(before), dict(after)
    changed = defaultdict[str, list[str]](list)
    for name in dict.fromkeys((*first, *second)):
        old, new = first.get(name, "none"), second.get(name, "none")
        if old != new:
            changed[f"{old} -> {new}"].append(name or "(outside of blocks)")
    parts = []
    for text, names in changed.items():
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        parts.append(f"{', '.join(names[:NAMED])}{more} {text}")
    return "; ".join(parts) or "in order"


def _sizes(before: Iterable[tuple[str, int]], after: Iterable[tuple[str, int]]) -> str:
    texts = ([(name, human_bytes(size)) for name, size in table] for table in (before, after))
    return _tables(*texts)


def _mesh(before: Iterable[tuple[str, int]], after: Iterable[tuple[str, int]]) -> str:
    return " -> ".join(" x ".join(f"{axis} {n}" for axis, n in mesh) for mesh in (before, after))


def _buckets(before: Buckets, after: Buckets) -> str:
    """Number of buckets of each kind."""
    parts = []
    for kind in (field.name for field in fields(before)):
        old, new = len(getattr(before, kind)), len(getattr(after, kind))
        if old != new:
            parts.append(f"{kind} {old} -> {new}")
        elif getattr(before, kind) != getattr(after, kind):
            parts.append(f"{kind} {old}, other ones")
    return "; ".join(parts)


def _compressions(before: Compressions, after: Compressions) -> str:
    """Changed counts of each method; "" if only the number of uncompressed buckets differs."""

    def methods(given: str | Sequence[str]) -> str:
        if isinstance(given, str):
            return given or "whole"
        counts = Counter(text for text in given if text)
        return ", ".join(f"{text} {n} of {len(given)}" for text, n in counts.items()) or "whole"

    first, second = (
        {field.name: methods(getattr(own, field.name)) for field in fields(own)}
        for own in (before, after)
    )
    return "" if first == second else _tables(first.items(), second.items())


def _partitions(before: Sequence[Partition], after: Sequence[Partition]) -> str:
    """Parameters with changed placements along each axis, or other differences."""

    def whole(one: Partition, other: Partition) -> Iterable[tuple[str, Placement]]:
        both = (name for name, _ in (*one.parameters, *other.parameters))
        return {name: one.layouts.get(name, Replicate()) for name in both}.items()

    first, second = ({own.axis: own for own in each} for each in (before, after))
    parts = []
    for axis in dict.fromkeys((*first, *second)):
        old, new = first.get(axis), second.get(axis)
        if old == new:
            continue
        if old is None or new is None:
            parts.append(f"not along {axis} any more" if new is None else f"along {axis} too")
        elif old.parameters != new.parameters:
            parts.append(f"{axis}: {_tables(whole(old, new), whole(new, old))}")
        else:
            parts.append(f"{axis}: parameters lie alike, operators or buckets do not")
    return "; ".join(parts)


def _pipeline(before: Pipeline | None, after: Pipeline | None) -> str:
    def form(own: Pipeline | None) -> str:
        if own is None:
            return "none"
        return f"{own.stages} stages, {own}" if own.stages > 1 else str(own)

    forms = form(before), form(after)
    parts = [" -> ".join(forms)] if forms[0] != forms[1] else []
    if before is not None and after is not None and before.starts != after.starts:
        starts = [", ".join(own.starts) for own in (before, after)]
        parts.append(f"stages begin with {' -> '.join(starts)}")
    return "; ".join(parts) or "other uses of parameters"


def _prediction(before: Prediction | None, after: Prediction | None) -> str:
    def arrow(text: Callable[[Prediction], str]) -> str:
        return " -> ".join("none" if own is None else text(own) for own in (before, after))

    ms = arrow(lambda p: duration(p.step_s))
    if before is None or after is None:
        return ms
    waits = arrow(lambda p: duration(p.exposed_s))
    peak = arrow(lambda p: human_bytes(p.peak_bytes))
    return f"a step {ms}, of it waiting {waits}; peak {peak}"


def _notes(before: Sequence[str], after: Sequence[str]) -> str:
    gone = [f"- {note}" for note in before if note not in after]
    come = [f"+ {note}" for note in after if note not in before]
    return " ".join((*gone, *come)) or "in order"


_TEXTS: Mapping[str, Callable[[Any, Any], str]] = {
    "mesh": _mesh,
    "zero_stages": _tables,
    "buckets": _buckets,
    "compressions": _compressions,
    "overlaps": lambda before, after: "collectives start and are waited for at other places",
    "recompute": _tables,
    "placements": _tables,
    "partitions": _partitions,
    "pipeline": _pipeline,
    "parameter_bytes": _sizes,
    "prediction": _prediction,
    "sent_bytes": _sizes,
    "runners_up": lambda before, after: f"{len(before)} -> {len(after)}, others",
    "notes": _notes,
}
