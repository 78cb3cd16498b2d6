"""Cache files that are damaged or cannot be read count as absent, with one warning."""

import json
import os
import stat
import warnings
from pathlib import Path

import pytest
import torch

from autopar.core.common import notices
from autopar.core.ir.roles import Input, Output
from autopar.cost_model.cluster.cluster import SCHEMA_VERSION, Cluster
from autopar.cost_model.disk_cache import cache_file, read_cached, write_cached
from autopar.cost_model.measurement import cluster_cache as kept
from autopar.cost_model.measurement.operator_times import OperatorTimes
from autopar.cost_model.memory.workspace import Workspace
from autopar.errors import MeasurementWarning
from tests.cost_model.kernels.replaced import replaced
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


USERS = {"operators": _operators, "scratch": _scratch, "clusters": _clusters}


def _mangled(text: str) -> dict[str, str | bytes]:
    """The file in every way in which it may be found damaged."""
    odd = json.loads(text)
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


def test_a_cache_without_a_home_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user has no entry in /etc/passwd."""
    monkeypatch.delenv("AUTOPAR_CACHE", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda _: {}["nobody"])
    assert read_cached("clusters", FACTS, dict) is None
    with pytest.warns(MeasurementWarning, match="set HOME, or AUTOPAR_CACHE to a folder"):
        write_cached("clusters", FACTS, {})


def test_a_file_of_another_user_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    before = os.umask(0o027)
    write_cached("clusters", FACTS, {"a": 1})
    os.umask(before)
    path = cache_file("clusters", FACTS)
    assert stat.filemode(path.stat().st_mode) == "-rw-r-----", "a group may share the folder"
    assert read_cached("clusters", FACTS, dict) == {"a": 1}

    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr("autopar.core.common.files.os.open", refuse)
        with pytest.warns(MeasurementWarning) as said:
            assert read_cached("clusters", FACTS, dict) is None
    path.unlink()
    os.mkfifo(path)
    with pytest.warns(MeasurementWarning) as of_pipe:
        assert read_cached("clusters", FACTS, dict) is None
    for (warning,), why in ((said, "(Permission denied)"), (of_pipe, "(not a regular file)")):
        assert f"cannot read {path}, a file of its cache {why}" in str(warning.message)


@torch.library.custom_op("autopar_kept::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_times_of_foreign_kernels_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's operator, and one of torch's with a kernel of the user."""
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    g = Sketch()
    x = g.take(Input(0), 8)
    made = [g.call(op, x) for op in (aten.sin.default, aten.cos.default)]
    foreign = g.call(torch.ops.autopar_kept.twice.default, x)
    graph = g.give({Output(i): each for i, each in enumerate((*made, foreign))})

    def kept() -> list[str]:
        OperatorTimes.load("cpu").measure([graph]).save()
        return sorted(key.partition("(")[0] for key in OperatorTimes.load("cpu").times)

    assert kept() == ["aten.cos.default", "aten.sin.default", "dispatch"]
    with replaced("cos"):
        assert kept() == ["aten.sin.default", "dispatch"]
    assert kept() == ["aten.cos.default", "aten.sin.default", "dispatch"]


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
