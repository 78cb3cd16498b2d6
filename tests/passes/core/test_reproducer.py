"""A failed pass leaves a file from which it fails again."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from autopar.core.ir.graph import TrainingGraph, elements, render
from autopar.errors import PassError
from autopar.passes.core.pass_base import Pass
from autopar.passes.core.pass_pipeline import PassPipeline
from autopar.passes.core.reproduce import main
from autopar.passes.core.reproducer import Reproducer, load, save
from autopar.passes.core.runner import apply_pass, run_passes
from autopar.passes.pipeline import build_pass_pipeline
from tests.passes.core.broken_pass import BrokenPass
from tests.passes.golden import TwoLayers, two_layers
from tests.passes.parity import World
from tests.passes.test_plans import world


def failure(passes: Sequence[Pass], graph: TrainingGraph) -> tuple[str, str]:
    """The error of passes and the command in it."""
    with pytest.raises(PassError) as error:
        run_passes(graph, passes)
    message = str(error.value)
    (command,) = re.findall(r"to run it again: python\S* (.*)", message)
    return message, command


def test_a_failed_pass_fails_again_from_its_file(tmp_path: Path) -> None:
    it = two_layers()
    before, after = build_pass_pipeline(it.plan(3), 0, "gloo")[:4], BrokenPass()
    message, command = failure([*before, after], it.graph(0))
    assert f"passes before it: {', '.join(before.names)}\n" in message
    arguments = command.split()
    assert arguments[:2] == ["-m", "autopar.passes.core.reproduce"]
    assert arguments[3:] == ["--import", "tests.passes.core.broken_pass"]
    path = Path(arguments[2])
    assert path.parent == Path(os.environ["AUTOPAR_REPRODUCERS"])  # gone with the session

    again = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
    (error,) = re.findall(r"failed: (.*)", message)
    assert f"ZeroDivisionError: {error}\nbroken_pass fails again\n" in again.stderr
    assert again.returncode == 1

    document = json.loads(path.read_text())
    assert document["error"] == error
    document["pipeline"] = ["broken_pass(fails=False)", "lower_collectives('gloo', 0)"]
    mended = tmp_path / "mended.json"
    mended.write_text(json.dumps(document))
    assert main([str(mended), "--graph"]) == 0


def test_a_file_that_is_no_reproducer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "file.json"
    for text, message in (
        ("", "is no reproducer of autopar"),
        ("[]", "is no reproducer of autopar"),
        ('{"pipeline": ["unknown_pass()"]}', "no pass is called unknown_pass"),
    ):
        path.write_text(text)
        with pytest.raises(SystemExit) as stop:
            main([str(path)])
        assert stop.value.code == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "target",
    [
        "os:system",
        "autopar.cli.script:launch",
        "autopar.passes.core.collective_ops:is_name",
        "_operator:call",
        "aten.nothing.default",
        "aten.mm.__call__",
        "aten.from_file.default",
        "aten.from_file.out",
        "aten.manual_seed.default",
        "prim.Print.default",
        "load_library.__call__.__call__",
    ],
)
def test_a_node_that_calls_what_no_graph_does(target: str) -> None:
    path = save(Reproducer(two_layers().graph(0), PassPipeline()))
    text = path.read_text()
    path.write_text(text.replace('"aten.mm.default"', json.dumps(target)))
    with pytest.raises(PassError, match=f"{re.escape(target)}.* is no operator|cannot find"):
        load(path)


def test_a_graph_that_makes_no_sense(tmp_path: Path) -> None:
    good = save(Reproducer(two_layers().graph(0), PassPipeline())).read_text()
    path = tmp_path / "file.json"
    for text, other in (
        ('"call_function"', '"posix:system"'),
        ("torch.float64", "-" * 100_000 + "1"),
    ):
        assert text in good
        path.write_text(good.replace(text, other))
        with pytest.raises(PassError, match=r"no reproducer|cannot read"):
            load(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(PassError, match="not a regular file"):
        load(path)


def test_a_node_that_takes_a_tensor() -> None:
    """Operators run at once on tensors that are not fake."""
    path = save(Reproducer(two_layers().graph(0), PassPipeline()))
    document = json.loads(path.read_text())
    (made, *_) = [node for node in document["nodes"] if node["op"] == "call_function"]
    made["args"] = "(Constant('AAAAAA==', (1,), torch.float32, device('cpu')),)"
    path.write_text(json.dumps(document))
    with pytest.raises(PassError, match="Constant is unknown"):
        load(path)


class Constants(TwoLayers):
    """TwoLayers with a tensor made in its code."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.tensor([1.0, 2.0, 3.0, float("nan")])[:3].sum())


def survives(graph: TrainingGraph) -> None:
    path = save(Reproducer(graph, PassPipeline()))
    again = load(path).graph
    path.unlink()
    assert render(again) == render(graph)
    assert replace(again, graph=graph.graph, constants={}, disposable=graph.disposable) == replace(
        graph, constants={}
    )
    assert again.constants.keys() == graph.constants.keys()
    for name, constant in graph.constants.items():
        assert again.constants[name].equal(constant) or constant.isnan().any()
    for node, copy in zip(graph.graph.nodes, again.graph.nodes, strict=True):
        assert str((copy.args, copy.kwargs)) == str((node.args, node.kwargs))
        assert copy.meta.keys() == node.meta.keys() - {"cost_type"}
        for key in copy.meta.keys() - {"val"}:
            assert copy.meta[key] == node.meta[key]
        for one, other in zip(elements(node), elements(copy), strict=True):
            assert layout(one) == layout(other)


def layout(value: object) -> object:
    if not isinstance(value, Tensor):
        return value
    return value.shape, value.stride(), value.storage_offset(), value.dtype, value.device


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rows"), [("gpt", 6), ("conv", 7)])
def test_graphs_survive_after_each_pass(name: str, rows: int) -> None:
    it = world(name, 3, rows)
    graph = it.graph(0)
    survives(graph)
    for item in build_pass_pipeline(it.plan(3, "full"), 0, "gloo"):
        graph = apply_pass(item, graph)
        survives(graph)


def test_constants_and_notes_survive() -> None:
    it = two_layers()
    graph = World(Constants().double(), it.batch, 2).graph(0)
    assert graph.constants
    survives(replace(graph, notes=("plain",)))
