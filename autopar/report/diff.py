"""`diff_lines`: differences between two plans, one line per field."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from autopar.formatting import human_bytes

if TYPE_CHECKING:
    from autopar.plan.buckets import Buckets
    from autopar.plan.compression import Compressions
    from autopar.plan.partition import Partition
    from autopar.plan.pipeline import Pipeline
    from autopar.plan.prediction import Prediction
    from autopar.plan.spec import PlanSpec

NAMED = 3
"""Number of names listed for one change."""


def diff_lines(one: PlanSpec, other: PlanSpec) -> list[str]:
    """One line per different field, in the order of the fields."""
    found = []
    for name in (field.name for field in fields(one)):
        before, after = getattr(one, name), getattr(other, name)
        if before != after and (text := _TEXTS.get(name, _values)(before, after)):
            found.append(f"{name}: {text}")
    return found


def _values(before: Any, after: Any) -> str:
    return f"{_short(before)} -> {_short(after)}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _tables(before: Iterable[tuple[str, Any]], after: Iterable[tuple[str, Any]]) -> str:
    """Changed names, grouped by equal change."""
    first, second = dict(before), dict(after)
    changed: dict[str, list[str]] = {}
    for name in dict.fromkeys((*first, *second)):
        old, new = first.get(name, "none"), second.get(name, "none")
        if old != new:
            changed.setdefault(f"{old} -> {new}", []).append(name or "(outside of blocks)")
    return "; ".join(f"{_named(names)} {text}" for text, names in changed.items()) or "in order"


def _named(names: Sequence[str]) -> str:
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")


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
    texts = [
        {f.name: _methods(getattr(own, f.name)) for f in fields(own)} for own in (before, after)
    ]
    return "" if texts[0] == texts[1] else _tables(*(text.items() for text in texts))


def _methods(given: str | Sequence[str]) -> str:
    if isinstance(given, str):
        return given or "whole"
    counts = Counter(text for text in given if text)
    return ", ".join(f"{text} {n} of {len(given)}" for text, n in counts.items()) or "whole"


def _partitions(before: Sequence[Partition], after: Sequence[Partition]) -> str:
    """Parameters with changed placements along each axis, or other differences."""
    first, second = ({own.axis: own for own in each} for each in (before, after))
    parts = []
    for axis in dict.fromkeys((*first, *second)):
        old, new = first.get(axis), second.get(axis)
        if old == new:
            continue
        if old is None or new is None:
            parts.append(f"not along {axis} any more" if new is None else f"along {axis} too")
        elif old.parameters != new.parameters:
            parts.append(f"{axis}: {_tables(_whole(old, new), _whole(new, old))}")
        else:
            parts.append(f"{axis}: parameters lie alike, operators or buckets do not")
    return "; ".join(parts)


def _whole(one: Partition, other: Partition) -> Iterable[tuple[str, str]]:
    """Placements of the parameters that either partition shards."""
    both = (name for name, _ in (*one.parameters, *other.parameters))
    return (dict.fromkeys(both, "R") | dict(one.parameters)).items()


def _pipeline(before: Pipeline | None, after: Pipeline | None) -> str:
    if before is None or after is None:
        return " -> ".join("none" if own is None else _form(own) for own in (before, after))
    forms = [_form(own) for own in (before, after)]
    parts = [" -> ".join(forms)] if forms[0] != forms[1] else []
    starts = [own.starts for own in (before, after)]
    if starts[0] != starts[1]:
        parts.append("stages begin with " + " -> ".join(", ".join(names) for names in starts))
    return "; ".join(parts) or "other uses of parameters"


def _form(own: Pipeline) -> str:
    return f"{own.stages} stages, {own}" if own.stages > 1 else str(own)


def _prediction(before: Prediction | None, after: Prediction | None) -> str:
    if before is None or after is None:
        texts = ["none" if own is None else f"{own.step_s * 1e3:.2f} ms" for own in (before, after)]
        return " -> ".join(texts)
    ms = " -> ".join(f"{own.step_s * 1e3:.2f} ms" for own in (before, after))
    waits = " -> ".join(f"{own.exposed_s * 1e3:.2f} ms" for own in (before, after))
    peak = " -> ".join(human_bytes(own.peak_bytes) for own in (before, after))
    return f"a step {ms}, of it waiting {waits}; peak {peak}"


def _runners_up(before: Sequence[Any], after: Sequence[Any]) -> str:
    return f"{len(before)} -> {len(after)}, others"


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
    "runners_up": _runners_up,
    "notes": _notes,
}
