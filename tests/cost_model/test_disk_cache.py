"""Cache files that are damaged count as absent, with one warning."""

import json
import warnings
from pathlib import Path

import pytest
import torch

from autopar.common import notices
from autopar.cost_model.cluster.cluster import SCHEMA_VERSION, Cluster
from autopar.cost_model.measurement import cluster_cache as kept
from autopar.cost_model.measurement.operator_times import OperatorTimes
from autopar.cost_model.memory.workspace import Workspace
from autopar.ir.roles import Input, Output
from autopar.passes.rules.loops import Operator
from autopar.passes.rules.proof import probing
from tests.cost_model.sketch import Sketch, aten

FACTS = {"machine": "this one"}


def _operators() -> object:
    g = Sketch()
    graph = g.give({Output(0): g.call(aten.sin.default, g.take(Input(0), 8))})
    found = OperatorTimes.load("cpu").measure([graph])
    found.save()
    return found.times.keys()


def _scratch() -> object:
    g = Sketch()
    graph = g.give({Output(0): g.call(aten.sin.default, g.take(Input(0), 8))})
    found = Workspace.load("cpu").measure([graph])
    found.save()
    return found.nbytes.keys()


def _clusters() -> object:
    if kept.read_cluster(FACTS) is None:
        kept.write_cluster(FACTS, Cluster.default(2, "cpu"), 1.0)
    return kept.read_cluster(FACTS)


def _probes() -> object:
    x = torch.rand(6, 4, 4)
    return probing.probe_loops(Operator(aten.diagonal_copy.default, (x, 0, 1, 2), {}, (x[:, 0],)))


USERS = {"operators": _operators, "scratch": _scratch, "clusters": _clusters, "probes": _probes}


def _mangled(text: str) -> dict[str, str | bytes]:
    """The file in every way in which it may be found damaged."""
    odd = json.loads(text)
    if isinstance(odd, list):
        odd[0]["size"] += 1
    else:
        table = next(odd[name] for name in ("times", "nbytes", "cluster") if name in odd)
        table["odd"] = float("nan")
    return {
        "empty": "",
        "cut short": text[: len(text) // 2],
        "another shape": '{"a": 1}',
        "a number": "3",
        "nothing": "null",
        "of text": '"text"',
        "too deep": "[" * 100_000,
        "no text": b"\xff\xfe\x00",
        "odd values": json.dumps(odd),
    }


@pytest.mark.parametrize("kind", USERS)
def test_damaged_files_are_told_once_and_replaced(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    want = USERS[kind]()
    (path,) = tmp_path.glob(f"{kind}/*.json")
    for how, content in _mangled(path.read_text()).items():
        whole = path.read_bytes()
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        notices.ISSUED.clear()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert USERS[kind]() == want, how
        assert len(said) == 1, how
        assert str(path) in str(said[0].message), how
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert USERS[kind]() == want, how  # replaced
        assert len(whole) // 2 < len(path.read_bytes()), how
    assert [file for file in tmp_path.rglob("*") if file.suffix == ".tmp"] == []


def test_a_cluster_of_another_schema_is_passed_over_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    _clusters()
    (path,) = tmp_path.glob("clusters/*.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": SCHEMA_VERSION - 1}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kept.read_cluster(FACTS) is None
