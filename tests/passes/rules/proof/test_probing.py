"""Probing of operators without a rule, and its cache on disk."""

from pathlib import Path

import pytest
import torch
from torch import fx

from autopar._torch import FakeTensorMode
from autopar.ir.graph import TrainingGraph
from autopar.ir.roles import Input, Output
from autopar.passes.core.node_builder import call
from autopar.passes.rules.loops import DimAccess, Loop, Operator, split_loop
from autopar.passes.rules.notes import unsupported_notes
from autopar.passes.rules.proof import probing
from autopar.passes.rules.proof.oracle import is_correct, run_operator

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory for this test."""
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    return tmp_path


def called(target: object, *args: object) -> Operator:
    made = Operator(target, args, {}, ())
    return Operator(target, args, {}, run_operator(made))


def test_loops_are_probed_at_small_sizes() -> None:
    operator = called(aten.diagonal_copy.default, torch.rand(400, 30, 30), 0, 1, 2)
    assert probing.probe_loops(operator) == [
        Loop(400, (DimAccess(0),), (DimAccess(0),), interleavable=False, even_only=True)
    ]


def test_arguments_that_are_sizes() -> None:
    operator = called(aten.unfold_copy.default, torch.rand(4, 6), 1, 2, 2)
    loops = probing.probe_loops(operator)
    assert [loop.operands for loop in loops] == [(DimAccess(0),)]
    assert all(is_correct(operator, split_loop(loop), 2) for loop in loops)


def test_two_operands_sharded_together() -> None:
    operator = called(
        aten._cdist_forward.default, torch.rand(6, 4, 5), torch.rand(6, 3, 5), 2.0, None
    )
    assert {loop.operands for loop in probing.probe_loops(operator)} == {
        (DimAccess(0), DimAccess(0)),
        (DimAccess(1), None),
        (None, DimAccess(1)),
    }


def test_loops_are_cached_on_disk(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    operator = called(aten.trace.default, torch.rand(6, 6))
    assert probing.probe_loops(operator) == []  # a scalar
    operator = called(aten.diagonal_copy.default, torch.rand(6, 6, 6))
    first = probing.probe_loops(operator)
    assert first
    monkeypatch.setattr(probing, "is_correct", lambda *_: pytest.fail("the operator ran again"))
    assert probing.probe_loops(operator) == first
    assert len(list(shelf.glob("probes/*.json"))) == 1


def test_note_for_replicated_operators() -> None:
    graph = fx.Graph()
    matrix = graph.placeholder("matrix")
    with FakeTensorMode():
        matrix.meta["val"] = torch.empty(6, 6)
        traces = [call(graph, matrix, aten.trace.default, matrix) for _ in range(2)]
        known = call(graph, matrix, aten.exp.default, matrix)
    graph.output([*traces, known])
    whole = TrainingGraph(graph, (Input(0),), (Output(0), Output(1), Output(2)), {})
    (note,) = unsupported_notes(whole, "tp")
    assert note == "aten.trace.default has no rule: whole on every rank of tp (2x)"


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.multinomial.default, (torch.rand(6, 6), 2)),
        (aten.add_.Tensor, (torch.rand(6), torch.rand(6))),
        (aten.nonzero.default, (torch.rand(6),)),
    ],
)
def test_operators_that_are_not_probed(target: object, args: tuple[object, ...]) -> None:
    assert not probing.can_be_probed(called(target, *args))


def test_opaque_workspaces_are_not_probed() -> None:
    """torch reads addresses from the workspace of an LSTM's backward."""
    x, workspace = torch.rand(6, 6), torch.zeros(6, dtype=torch.uint8)
    layer = Operator(aten.mkldnn_rnn_layer_backward.default, (x, workspace), {}, (x,))
    assert not probing.can_be_probed(layer)
    assert probing.can_be_probed(called(aten.cumsum.default, workspace, 0))
