"""`all_cases`: every argument, document and file that must be refused."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autopar.core.plan.plan import Plan
from autopar.cost_model.cluster.cluster import Cluster
from autopar.session.profiler.report import Profile
from tests.harness.nonsense.arguments import argument_cases
from tests.harness.nonsense.case import Case
from tests.harness.nonsense.documents import (
    changed,
    contradiction_cases,
    document_cases,
    drawn_cases,
    places,
)
from tests.harness.nonsense.examples import example_plan, example_profile

TEXTS: Mapping[str, bytes] = {
    "empty": b"",
    "cut": b'{"name": ',
    "deep-list": b"[" * 100_000,
    "deep-closed": b"[" * 100_000 + b"]" * 100_000,
    "deep-object": b'{"name":' * 100_000,
    "digits": b"1" * 100_000,
    "nan": b"NaN",
    "null": b"null",
    "number": b"3",
    "text": b'"x"',
    "list": b"[]",
    "object": b"{}",
    "binary": bytes(range(256)),
    "utf-16": '{"name": "x"}'.encode("utf-16"),
}


def file_cases(folder: Path) -> Iterator[Case]:
    """Files that are no JSON, or not of any use; errors name the file."""
    for name, content in TEXTS.items():
        path = folder / f"{name}.json"
        path.write_bytes(content)
        for call in (Cluster.load, Plan.load, Profile.load):
            said = f"{call.__qualname__} of {name}"
            yield Case("file", (path.name,), said, lambda call=call, path=path: call(path))


def profile_reader(folder: Path) -> Callable[[Any], Any]:
    """Reads a profile from a document, by a file."""
    path = folder / "rank0.json"

    def read(document: Any) -> Profile:
        path.write_text(json.dumps(document))
        return Profile.load(path)

    return read


def all_cases(folder: Path, seed: int) -> Iterator[Case]:
    """Every case.

    Args:
        folder: for files.
        seed: of the documents that are drawn.
    """
    script = folder / "make.py"
    script.write_text(
        "from tests.harness.nonsense.arguments import INPUTS, Model\n\n"
        "def make():\n    return Model(), INPUTS\n"
    )
    yield from argument_cases(str(script))
    plan = example_plan().to_dict()
    cluster = json.loads(json.dumps(Cluster.named("dgx-h100").to_dict()))
    profile = json.loads(json.dumps(asdict(example_profile())))
    yield from contradiction_cases()
    for kind, read, document in (
        ("plan document", Plan.from_dict, plan),
        ("cluster document", Cluster.from_dict, cluster),
        ("profile document", profile_reader(folder), profile),
    ):
        yield from document_cases(kind, read, document)
        yield from drawn_cases(kind, read, document, seed, 100)
    yield from file_cases(folder)


LIKELY: Mapping[type, Sequence[Any]] = {
    bool: [True, False],
    int: [0, 1, 2, 3, 2**20, 2**62],
    float: [0.0, 1e-300, 1.0, 1e300],
    str: ["", "x", "reduce", "pp", "S(0)", "R"],
    list: [[]],
    dict: [{}],
}
"""Values that a place of each type may hold, whether or not they fit to the rest."""


def likely_documents(document: Any) -> Iterator[tuple[str, Any]]:
    """Descriptions of a change, each with a copy of the document that has it.

    A change puts another value of the same type, or None, at one path.
    """
    for path, held in places(document):
        values = [*LIKELY.get(type(held), ()), None]
        if isinstance(held, list):
            values += [held + held, held * 3, held[::-1]]
        for value in values:
            if held is not None and value != held:
                yield f"{path} = {value!r:.40}", changed(document, path, value)
