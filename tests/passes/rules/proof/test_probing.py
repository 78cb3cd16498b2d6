"""Probing of operators without a rule, and how long its loops are kept."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import fx

import autopar
from autopar._torch import FakeTensor, FakeTensorMode
from autopar.core.ir.graph import TrainingGraph
from autopar.core.ir.roles import Input, Output
from autopar.errors import MeasurementWarning
from autopar.passes.core.node_builder import call
from autopar.passes.rules.loops import DimAccess, Loop, Operator, split_loop
from autopar.passes.rules.notes import unsupported_notes
from autopar.passes.rules.proof import oracle, probing
from autopar.passes.rules.proof.oracle import is_correct, run_operator
from tests.cost_model.kernels.replaced import replaced
from tests.harness.fake_cuda import FakeCuda

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory for this test."""
    probing._REFUSED.clear()
    probing._FOUND.clear()
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


def test_a_capture_does_not_change_what_is_found() -> None:
    """Ranks ask at other times, some of them while a model is captured."""
    operator = called(aten._fft_c2c.default, torch.rand(8, 6) + 1j, [0], 0, True)
    with FakeTensorMode():
        loops = probing.probe_loops(operator)
    probing._FOUND.clear()
    assert loops == probing.probe_loops(operator)
    assert [loop.operands for loop in loops] == [(DimAccess(1),)]


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


def test_loops_are_kept_in_this_process(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    operator = called(aten.trace.default, torch.rand(6, 6))
    assert probing.probe_loops(operator) == []  # a scalar
    operator = called(aten.diagonal_copy.default, torch.rand(6, 6, 6))
    first = probing.probe_loops(operator)
    assert first
    monkeypatch.setattr(probing, "is_correct", lambda *_: pytest.fail("the operator ran again"))
    assert probing.probe_loops(operator) == first
    kept = [path for path in shelf.iterdir() if not path.name.startswith("torchinductor")]
    assert not kept, "the next process may have another kernel"


def _mixed(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(0, keepdim=True)


@pytest.mark.parametrize(
    ("replaced_name", "kernel"),
    [
        ("_cdist_forward", lambda a, b, *_: _mixed((a[:, :, None] - b[:, None]).norm(dim=-1))),
        ("copy_", lambda x, source, *_: x.set_(_mixed(source).reshape(x.shape))),
    ],
    ids=["its own", "one it calls"],
)
def test_operators_with_a_kernel_of_the_user_are_probed_again(
    replaced_name: str, kernel: Callable[..., torch.Tensor]
) -> None:
    """`diagonal_copy` calls `copy_`; both kernels mix the rows."""
    arguments = (torch.rand(6, 4, 5), torch.rand(6, 3, 5), 2.0, None)
    operator = called(aten._cdist_forward.default, *arguments)
    if replaced_name == "copy_":
        operator = called(aten.diagonal_copy.default, torch.rand(6, 4, 4), 0, 1, 2)
    first = probing.probe_loops(operator)
    assert any(loop.results[0] == DimAccess(0) for loop in first)
    with replaced(replaced_name, kernel):
        again = probing.probe_loops(operator)
    assert not any(loop.results[0] == DimAccess(0) for loop in again)
    assert probing.probe_loops(operator) == first


def test_a_custom_operator_that_changed_is_probed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second kernel is that of a later process."""
    dims = []
    for kernel in (lambda x: x * 2, lambda x: x - x.mean(0, keepdim=True)):
        library = torch.library.Library("autopar_changed", "FRAGMENT")
        library.define("centre(Tensor x) -> Tensor")
        library.impl("centre", kernel, "CPU")
        library.impl("centre", torch.empty_like, "Meta")
        operator = called(torch.ops.autopar_changed.centre.default, torch.rand(6, 6))
        first = probing.probe_loops(operator)
        with monkeypatch.context() as patch:
            patch.setattr(probing, "is_correct", lambda *_: pytest.fail("the operator ran again"))
            assert probing.probe_loops(operator) == first
        dims.append([loop.operands for loop in first])
        probing._FOUND.clear()
        library._destroy()
    assert dims == [[(DimAccess(0),), (DimAccess(1),)], [(DimAccess(1),)]]


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


def test_places_are_not_probed() -> None:
    """Backwards of pooling write to any place that they are given."""
    x = torch.rand(2, 3, 6, 6, 6)
    out, places = aten.adaptive_max_pool3d(x, (2, 2, 2))
    backward = aten.adaptive_max_pool3d_backward.default
    assert not probing.can_be_probed(called(backward, torch.ones_like(out), x, places))


@pytest.fixture(scope="module")
def gpu_operator() -> Iterator[object]:
    """An operator with a kernel for GPUs and a fake one, and none for CPUs."""
    library = torch.library.Library("autopar_probing", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", torch.empty_like, "Meta")
    library.impl("twice", lambda x: x * 2, "CUDA")
    yield torch.ops.autopar_probing.twice.default
    library._destroy()


def fake_called(target: object, *shapes: tuple[int, ...]) -> Operator:
    with FakeTensorMode():
        return called(target, *(torch.empty(shape) for shape in shapes))


def test_operators_of_a_gpu_stay_whole_elsewhere_and_are_named_once(
    gpu_operator: object, shelf: Path
) -> None:
    operator = fake_called(gpu_operator, (8, 4))
    with pytest.warns(MeasurementWarning, match=r"autopar_probing.twice.*on cpu: NotImpl"):
        assert probing.probe_loops(operator) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert probing.probe_loops(operator) == []


def test_a_model_with_an_operator_of_a_gpu_is_planned(gpu_operator: object) -> None:
    class Doubled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).square().mean() + gpu_operator(x).sum()  # type: ignore[operator]

    options = {"example_inputs": (torch.rand(8, 8),), "optimizer": torch.optim.SGD}
    with pytest.warns(MeasurementWarning, match="autopar_probing.twice"):
        plan = autopar.plan(Doubled(), 4, strategy=autopar.Strategy(tp=2), **options)
    assert any("autopar_probing.twice" in note for note in plan.notes)


def test_operators_are_probed_on_the_device_of_the_model(
    gpu_operator: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in: what is sent to "cuda" stays where it is, and its kernel runs."""
    FakeCuda(monkeypatch)
    move, devices = torch.Tensor.to, list[object]()

    def to(tensor: torch.Tensor, where: object) -> torch.Tensor:
        devices.append(where)
        return tensor if where == "cuda" else move(tensor, where)

    def run(operator: Operator) -> tuple[torch.Tensor, ...]:
        if devices[-1] == "cpu" and not isinstance(operator.operands[0], FakeTensor):
            raise NotImplementedError
        return (operator.operands[0] * 2,)

    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(probing, "run_operator", run)
    monkeypatch.setattr(oracle, "run_operator", run)
    loops = probing.probe_loops(fake_called(gpu_operator, (8, 4)))
    assert [loop.operands for loop in loops] == [(DimAccess(0),), (DimAccess(1),)]
    assert "cuda" in devices


def test_integers_that_may_be_indices_do_not_reach_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch)
    floats, integers = torch.rand(4, 4), torch.zeros(4, 4, dtype=torch.long)
    assert probing._devices(called(aten.diagonal_copy.default, floats)) == ["cpu", "cuda"]
    taken = called(aten.take_along_dim.default, floats, integers, 0)
    assert probing._devices(taken) == ["cpu"]
