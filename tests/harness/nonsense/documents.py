"""Documents with one field changed, or fields that contradict each other."""

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from autopar.core.plan.plan import Plan
from autopar.core.plan.prediction import StagePrediction
from autopar.core.plan.reader import ADDED
from tests.harness.nonsense.case import INF, NAN, Case
from tests.harness.nonsense.examples import Path_, example_plan

NONSENSE: Mapping[type, Sequence[Any]] = {
    bool: [0, 1, 3, 1.5, "x", None, [], {}, NAN],
    int: [True, 1.5, -1, NAN, INF, 10**30, 10**4000, "x", None, [], {}, [[1]]],
    float: [True, NAN, INF, -INF, 10**30, "x", None, [], {}, [[1.0]]],
    str: [3, True, 1.5, None, [], {}, NAN, "\ud800"],
    list: [3, True, "x", None, {}, NAN, {"a": []}],
    dict: [3, True, "x", [], NAN, [{}]],
}
"""Invalid values for a field of each JSON type."""

OPTIONAL = {
    "activation_bytes", "precision", "reduce_precision", "memory_cap", "pipeline", "prediction",
    "work", "topology", "figures", "link", "device_memory_bytes", "host_memory_bytes", "again",
}  # fmt: skip
FREE = {"graph"}  # networkx's own, of any content


def places(document: Any, path: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    """Every place in a document; of a list of lists or objects only the first of them."""
    if path:
        yield path, document
    if path and path[-1] in FREE:
        return
    items = document.items() if isinstance(document, dict) else ()
    if isinstance(document, list):
        nested = document[:1] and isinstance(document[0], (dict, list))
        items = enumerate(document[: 1 if nested else 6])
    for key, value in items:
        yield from places(value, (*path, key))


def changed(document: Any, path: Path_, value: Any) -> Any:
    """A copy of a document with another value at a place."""
    result = copy.deepcopy(document)
    inner = result
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return result


def fields_of(path: Path_) -> tuple[str, ...]:
    """The names that an error about a place may use: the last two of it."""
    return tuple(key for key in path if isinstance(key, str))[-2:]


def document_cases(kind: str, read: Callable[[Any], Any], document: Any) -> Iterator[Case]:
    """Every place of a document with every nonsense of its type, unknown fields, missing ones."""
    for path, held in places(document):
        if held is None or path == ("schema_version",):
            continue
        for value in NONSENSE[type(held)]:
            if value is None and path[-1] in OPTIONAL:
                continue
            bad = changed(document, path, value)
            said = f"{path} = {type(value).__name__}"
            yield Case(kind, fields_of(path), said, lambda bad=bad: read(bad))
    for name in document.keys() - {"again", "host", "storage", *ADDED}:
        short = {key: value for key, value in document.items() if key != name}
        yield Case(kind, (name,), f"no {name}", lambda short=short: read(short))
    yield Case(kind, ("stranger",), "a stranger", lambda: read({**document, "stranger": 1}))


def drawn_cases(
    kind: str, read: Callable[[Any], Any], document: Any, seed: int, count: int
) -> Iterator[Case]:
    """Documents with a value of one place at another, of another type, drawn by a seed."""
    draw = random.Random(seed)
    spots = [(path, held) for path, held in places(document) if held is not None]
    while count:
        path, held = draw.choice(spots)
        value = draw.choice([*NONSENSE[type(held)], [[[]]], {"a": {"b": {}}}, deep(200)])
        if value is None or path == ("schema_version",) or (held == [] and value == []):
            continue
        if path[-1] in FREE and isinstance(value, dict):
            continue
        bad = changed(document, path, value)
        count -= 1
        said = f"{path} = {type(value).__name__}"
        yield Case(kind, fields_of(path), said, lambda bad=bad: read(bad))


def deep(levels: int) -> Any:
    """Lists in lists."""
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


CONTRADICTIONS: Mapping[str, Sequence[tuple[Path_, Any]]] = {
    "mesh": [
        (("world_size",), 9),
        (("world_size",), 2**40),
        (("mesh",), []),
        (("mesh", 0, 0), "x"),
        (("mesh", 1, 0), "pp"),
        (("mesh", 2, 1), 4),
        (("mesh", 1, 0), "cp"),
    ],
    "zero_stages": [
        (("zero_stages",), []),
        (("zero_stages", 0, 1), 4),
        (("zero_stages", 1, 0), ""),
    ],
    "batch": [(("batch",), "x"), (("batch",), "")],
    "batch_semantics": [(("batch_semantics",), "x")],
    "recompute": [(("recompute", 0, 1), "some"), (("recompute", 0, 0), "blocks.9")],
    "precision": [(("precision",), "int8"), (("precision",), "x"), (("precision",), "nn")],
    "reduce_precision": [(("reduce_precision",), "float16"), (("reduce_precision",), "bf16")],
    "placements": [
        (("placements",), []),
        (("placements", 0, 0), "x"),
        (("placements", 0, 1), "x"),
        (("placements", 0, 1), "S(-1)"),
        (("placements", 0, 1), "P(sum)"),
    ],
    "partitions": [
        (("partitions",), []),
        (("partitions", 0, "axis"), "x"),
        (("partitions", 0, "ranks"), 3),
        (("partitions", 0, "parameters", 0, 0), "x"),
        (("partitions", 0, "parameters", 0, 1), "Q"),
        (("partitions", 0, "strategies", 0, 0), "x"),
    ],
    "levels": [(("levels", 0, "intra_node"), 3), (("levels", 0, "axis"), "x")],
    "buckets": [(("buckets", "gather", 0), []), (("buckets", "reduce", 0, 0), "x")],
    "compressions": [
        (("compressions", "gather"), ["bf16", "bf16"]),
        (("compressions", "reduce", 0), "int9"),
        (("compressions", "activations"), "powersgd(rank=0)"),
    ],
    "overlaps": [(("overlaps", 0, "gather", 0), -1.0)],
    "pipeline": [
        (("pipeline", "ranks"), 4),
        (("pipeline", "schedule"), "x"),
        (("pipeline", "uses", 0, 1), []),
        (("pipeline", "uses", 0, 1), [2]),
        (("pipeline", "uses", 0, 0), "x"),
    ],
    "prediction": [
        (("prediction", "stages"), [asdict(StagePrediction(8, 0.1, 0.2, 8, 8, 8, 1))]),
        (("prediction", "events", 0, 3), 0.0),
        (("prediction", "report_data", "memory", 0, 1), [1]),
        (("prediction", "step_s"), -1.0),
    ],
    "schema_version": [(("schema_version",), v) for v in (0, -1, 99, "5", None, [], NAN, 5.5)],
}
"""Changes of the example plan after which its fields contradict each other."""


def contradiction_cases() -> Iterator[Case]:
    """All of them; the event is moved to after its end first."""
    document = example_plan().to_dict()
    document["prediction"]["events"][0][2] = 0.05
    for field, changes in CONTRADICTIONS.items():
        for path, value in changes:
            bad = changed(document, path, value)
            names = (field, *fields_of(path), *(("placements",) if field == "mesh" else ()))
            said = f"{path} = {value!r:.30}"
            yield Case("plan document", names, said, lambda bad=bad: Plan.from_dict(bad))
