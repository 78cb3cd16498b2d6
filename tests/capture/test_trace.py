"""What a model's call becomes as a graph, and what stops it."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from autopar.capture.call import batch_shard_of
from autopar.capture.model_info import describe_parameters
from autopar.capture.trace import Capture, capture
from autopar.core.ir.graph import TrainingGraph, elements, source_line
from autopar.core.ir.roles import Buffer, Gradient, Input, Output, Parameter, Tangent, Update
from autopar.errors import CaptureError, StrategyError
from tests.harness.models import MODELS
from tests.passes.parity import CPU, World
from tests.passes.simulated import run_ranks

Forward = Callable[..., Any]
W, B = Parameter("lin.weight"), Parameter("lin.bias")
X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    """One layer, whose forward a test gives."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self.does = (forward,)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.does[0](self, *args, **kwargs)


def captured(model: nn.Module | Forward, *args: Any, loss_fn: Any = None, **kwargs: Any) -> Capture:
    options = {k: kwargs.pop(k) for k in ("differentiate", "all_tangents") if k in kwargs}
    model = model if isinstance(model, nn.Module) else Model(model)
    leaves, structure = pytree.tree_flatten((args or (X,), kwargs))
    call = batch_shard_of(leaves, structure, mode="global", rank=0, ranks=1).call
    parameters = describe_parameters(model)
    return capture(model, call, parameters, device=CPU, loss_fn=loss_fn, **options)


def run(model: nn.Module, graph: TrainingGraph, *args: Tensor) -> dict[Any, Tensor]:
    """Runs a captured graph on the model's values and a gradient of one for all outputs."""
    values: dict[Any, Tensor] = {Parameter(n): p.detach() for n, p in model.named_parameters()}
    values |= {Buffer(n): b.clone() for n, b in model.named_buffers()}
    values |= {Input(i): x.clone() for i, x in enumerate(args)}
    for role, node in zip(graph.inputs, graph.placeholders, strict=True):
        if isinstance(role, Tangent):
            values[role] = torch.ones(node.meta["val"].shape)
    return run_ranks([graph], [values])[0]  # type: ignore[return-value]


def loss(model: Model, x: Tensor) -> Tensor:
    return model.lin(x).tanh().mean()


# -- roles -------------------------------------------------------------------------------------


def test_roles_of_a_training_step() -> None:
    graph = captured(loss).graph
    assert graph.inputs == (W, B, Buffer("scale"), Input(0), Tangent(0))
    assert graph.outputs == (Output(0), Gradient(W), Gradient(B))


def test_it_computes_what_the_model_does() -> None:
    model = Model(loss)
    results = run(model, captured(model).graph, X)
    want = model(X)
    assert torch.equal(results[Output(0)], want.detach())
    assert torch.equal(results[Gradient(W)], torch.autograd.grad(want, model.lin.weight)[0])


def test_the_model_is_left_as_it_was() -> None:
    model = Model(lambda m, x: (m.scale.add_(1), loss(m, x))[1])
    parameters, gradients = list(model.parameters()), torch.is_grad_enabled()
    state, generator = torch.random.get_rng_state(), random.getstate()
    captured(model)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert model.scale.tolist() == [1.0] * 4
    assert torch.equal(state, torch.random.get_rng_state())
    assert generator == random.getstate()
    assert torch.is_grad_enabled() == gradients
    assert not nn.modules.module._global_forward_pre_hooks


def test_frozen_unused_and_tied_parameters() -> None:
    """odd: frozen.*, unused.* and tied.weight, which is shared.weight."""
    model = MODELS["odd"].make()
    args, kwargs = MODELS["odd"].batch(3, 0)
    graph = captured(model, *args, **kwargs).graph
    parameters = [role.name for role in graph.inputs if isinstance(role, Parameter)]
    assert "tied.weight" not in parameters
    assert "alias.weight" not in parameters
    assert {"frozen.weight", "unused.weight", "shared.weight"} <= set(parameters)
    gradients = {r.of.name for r in graph.outputs if isinstance(r, Gradient)}  # type: ignore
    assert gradients == {"shared.weight", "shared.bias", "gain"}
    assert Update(Buffer("calls")) in graph.outputs


def test_a_module_called_twice_has_one_input_and_one_gradient() -> None:
    model = Model(lambda m, x: m.lin(torch.tanh(m.lin(x))).mean())
    graph = captured(model).graph
    assert graph.inputs.count(W) == graph.outputs.count(Gradient(W)) == 1
    want = torch.autograd.grad(model(X), model.lin.weight)[0]
    assert torch.allclose(run(model, graph, X)[Gradient(W)], want)


def test_kwargs_nested_inputs_and_outputs() -> None:
    def forward(m: Model, pair: Any, *, options: dict[str, Any]) -> dict[str, Any]:
        y = m.lin(pair[0]) * options["gain"] + pair[1]
        return {"loss": y.mean(), "rest": [y, None, options["n"]], "rows": len(y)}

    options = {"gain": torch.tensor(2.0), "n": 3, "none": None}
    it = captured(forward, (X, X + 1), options=options)
    assert it.graph.inputs[3:] == (Input(0), Input(1), Input(2), Tangent(0))
    assert it.leaves == (None, None, None, 3, 3)
    assert it.tensor_leaves == (True, True, False, False, False)
    assert it.graph.outputs[:2] == (Output(0), Output(1))
    rebuilt = pytree.tree_unflatten(["l", "y", None, 3, 3], it.structure)
    assert rebuilt == {"loss": "l", "rest": ["y", None, 3], "rows": 3}


def test_buffers_and_inputs_that_are_updated() -> None:
    def forward(m: Model, x: Tensor) -> Tensor:
        x.mul_(2)
        m.scale.mul_(0.5)
        return (m.lin(x) * m.scale).mean()

    model = Model(forward)
    results = run(model, captured(model).graph, X)
    assert torch.equal(results[Update(Input(0))], X * 2)
    assert results[Update(Buffer("scale"))].tolist() == [0.5] * 4
    y = X.clone()
    assert torch.equal(results[Output(0)], model(y).detach())


def test_the_backward_reads_what_the_forward_read() -> None:
    """A buffer that is updated behind autograd's back has its new value by then."""

    def forward(m: Model, x: Tensor) -> Tensor:
        y = (m.lin(x) * m.scale).mean()
        m.scale.data.mul_(3)  # type: ignore[operator,union-attr]
        return y

    graph = captured(forward).graph
    scale = graph.placeholder(Buffer("scale"))
    assert scale is not None
    assert Update(Buffer("scale")) in graph.outputs
    assert {user.meta["phase"] for user in scale.users} == {"forward"}


def test_an_input_that_requires_grad_has_a_gradient() -> None:
    graph = captured(loss, X.clone().requires_grad_()).graph
    assert Gradient(Input(0)) in graph.outputs


def test_without_grad_there_is_only_a_forward() -> None:
    it = captured(loss, differentiate=False)
    assert it.graph.outputs == (Output(0),)
    assert it.graph.backward_start is it.graph.output_node
    assert it.differentiable == (False,)


def test_gradients_enter_by_losses_or_by_everything() -> None:
    def forward(m: Model, x: Tensor) -> tuple[Tensor, ...]:
        y = m.lin(x)
        return y.mean(), y, y.detach(), y.argmax(-1)

    it, everything = captured(forward), captured(forward, all_tangents=True)
    assert it.differentiable == everything.differentiable == (True, True, False, False)
    assert [r for r in it.graph.inputs if isinstance(r, Tangent)] == [Tangent(0)]
    assert [r for r in everything.graph.inputs if isinstance(r, Tangent)] == [
        Tangent(0),
        Tangent(1),
    ]


def test_rows_take_gradients_where_there_is_no_loss() -> None:
    assert Tangent(0) in captured(lambda m, x: m.lin(x)).graph.inputs


@pytest.mark.parametrize(
    ("forward", "returned"),
    [
        (lambda m, x: (loss(m, x), x), "primals_4"),
        (lambda m, x: (loss(m, x), m.scale), "primals_3"),
        (lambda m, x: (loss(m, x), m.lin.weight), "clone"),
    ],
    ids=["input", "buffer", "parameter"],
)
def test_returning_what_was_given(forward: Forward, returned: str) -> None:
    assert str(captured(forward).graph.result(Output(1))) == returned


def test_a_result_returned_twice() -> None:
    graph = captured(lambda m, x: (lambda y: (y, y))(loss(m, x))).graph
    assert graph.result(Output(0)) is graph.result(Output(1))


# -- what models do inside ---------------------------------------------------------------------


def test_autocast_inside() -> None:
    def forward(m: Model, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return m.lin(x).float().mean()

    graph = captured(forward).graph
    dtypes = {t.dtype for node in graph.calls() for t in elements(node)}
    assert torch.bfloat16 in dtypes
    gradient = graph.result(Gradient(W))
    assert gradient is not None
    assert gradient.meta["val"].dtype == torch.float32


def test_autocast_outside_casts_a_weight_at_every_use() -> None:
    """The cast that autocast would keep is a fake one, and would outlive the capture."""
    with torch.autocast("cpu", torch.bfloat16):
        graph = captured(lambda m, x: m.lin(m.lin(x)).mean()).graph
    weight = graph.placeholder(W)
    assert weight is not None
    casts = [user for user in weight.users if user.meta["phase"] == "forward"]
    assert [node.meta["val"].dtype for node in casts] == [torch.bfloat16] * 2


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 3


def penalised(m: Model, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(m.lin(x).tanh().sum(), x, create_graph=True)
    return slope.square().mean()


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: Tripled.apply(m.lin(x)).mean(),
        lambda m, x: checkpoint(lambda y: m.lin(y).tanh(), x, use_reentrant=False).mean(),
        lambda m, x: torch.func.vmap(m.lin)(x).mean(),
        penalised,
    ],
    ids=["function", "checkpoint", "vmap", "double_backward"],
)
def test_gradients_through(forward: Forward) -> None:
    model = Model(forward)
    want = torch.autograd.grad(model(X), model.lin.weight)[0]
    got = run(model, captured(model).graph, X)[Gradient(W)]
    assert torch.allclose(got, want)
    assert got.abs().max() > 0


def test_tensors_outside_of_buffers_are_constants_that_stay_themselves() -> None:
    table = torch.randn(4)
    model = Model(lambda m, x: (m.lin(x) * table).mean())
    graph = captured(model).graph
    assert any(constant is table for constant in graph.constants.values())
    table.mul_(2)
    assert torch.equal(run(model, graph, X)[Output(0)], model(X).detach())


def test_parametrised_weights() -> None:
    model = Model(loss)
    nn.utils.parametrizations.weight_norm(model.lin)
    graph = captured(model).graph
    assert Gradient(Parameter("lin.parametrizations.weight.original1")) in graph.outputs


def test_loss_fn_with_a_buffer() -> None:
    weight = torch.tensor([0.1, 0.2, 0.3, 0.4])
    model, target = Model(lambda m, x: m.lin(x)), torch.tensor([0, 3, 1])
    criterion = nn.CrossEntropyLoss(weight)
    graph = captured(model, X, target, loss_fn=criterion).graph
    got = run(model, graph, X, target)[Output(0)]
    assert torch.allclose(got, F.cross_entropy(model(X), target, weight).detach())


def test_loss_fn_with_parameters_is_an_error() -> None:
    with pytest.raises(StrategyError, match="make it part of the model"):
        captured(lambda m, x: m.lin(x), X, X, loss_fn=nn.PReLU())


# -- what stops a capture ----------------------------------------------------------------------


def follow_a_weight(model: nn.Module, x: Tensor) -> Tensor:
    """Moves a frozen parameter towards a trained one."""
    with torch.no_grad():
        model.slow.lerp_(model.lin.weight, 0.1)
    return loss(model, x)


def change_a_weight(m: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.lin.weight.mul_(0.9)
    return loss(m, x)


PYTHON, SHAPE = "Python needs the value of a tensor", "the shape of a result depends on values"
UNCAPTURABLE: dict[str, tuple[Forward, str]] = {
    "if": (lambda m, x: loss(m, x) if x.sum() > 0 else x.sum(), PYTHON),
    "item": (lambda m, x: loss(m, x) * x.sum().item(), PYTHON),
    "mask": (lambda m, x: loss(m, x[x[:, 0] > 0]), SHAPE),
    "nonzero": (lambda m, x: m.lin(x)[x[:, 0].nonzero()].mean(), SHAPE),
    "bug": (lambda m, x: m.lin(x[:, :3]).mean(), "mat1 and mat2 shapes cannot be multiplied"),
}


@pytest.mark.parametrize("name", UNCAPTURABLE)
def test_an_error_names_the_users_line(name: str) -> None:
    forward, reason = UNCAPTURABLE[name]
    line = forward.__code__.co_firstlineno
    with pytest.raises(CaptureError) as error:
        captured(forward)
    message = str(error.value)
    assert message.startswith("cannot capture Model at ")
    assert f"test_trace.py:{line}: " in message
    assert reason in message
    advice = "Express it with tensor operations (torch.where, masks)."
    if reason == PYTHON:
        advice += " For values of an integer argument, name it in static= of autopar.compile."
    if reason == SHAPE:
        advice = "torch.where(mask, x, 0). Experts: docs/strategies.md#experts."
    assert message.endswith(advice)


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda m, x: loss(m, x) * random.random(), "draws numbers from Python's or numpy's"),
        (lambda m, x: loss(m, x) * np.random.rand(), "draws numbers from Python's or numpy's"),
        (change_a_weight, r"parameter lin\.weight in place.* freeze it"),
        (lambda m, x: F.embedding(x.long().abs(), m.lin.weight, sparse=True).mean(), "sparse"),
    ],
    ids=["random", "numpy", "in_place", "sparse"],
)
def test_what_a_graph_could_not_repeat(forward: Forward, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        captured(forward)


def test_a_frozen_parameter_that_forward_moves_is_a_buffer() -> None:
    model = Model(follow_a_weight)
    model.slow = nn.Parameter(torch.zeros(4, 4), requires_grad=False)
    graph = captured(model).graph
    assert Buffer("slow") in graph.inputs
    assert Update(Buffer("slow")) in graph.outputs


# -- where operators come from -----------------------------------------------------------------


def test_operators_know_their_line_and_block() -> None:
    case = MODELS["gpt"]
    args, _ = case.batch(2, 0)
    graph = captured(case.make(), *args).graph
    blocks = {node.meta["block"] for node in graph.calls()}
    assert blocks == {"", "blocks.0", "blocks.1"}
    for node in graph.calls():
        if "scaled_dot_product" in str(node.target):
            assert source_line(node).startswith("model_parts.py:")
            assert "F.scaled_dot_product_attention(" in source_line(node)
            assert node.meta["block"] in ("blocks.0", "blocks.1")
    (last,) = [node for node in graph.calls() if "nll_loss_forward" in str(node.target)]
    assert last.meta["block"] == ""


def test_blocks_are_the_outermost_repeated_layers() -> None:
    model = nn.ModuleDict(
        {
            "stem": nn.Linear(2, 2),
            "layers": nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2)),
            "head": nn.Sequential(nn.Linear(2, 2)),
        }
    )
    blocks = {name: info.block for name, info in describe_parameters(model).items()}
    assert blocks["stem.weight"] == "stem"
    assert blocks["layers.1.0.weight"] == "layers.1.0"
    assert blocks["head.0.bias"] == "head.0"


# -- rows --------------------------------------------------------------------------------------


def rows_of(forward: Forward, rows: int = 3, ranks: int = 1) -> dict[str, tuple[Any, ...]]:
    """For each operator of the forward, the dims that run over rows."""
    x = torch.randn(rows * ranks, 2, 4)
    graph = World(Model(forward), ((x,), {}), ranks).graph(0)
    return {n.name: n.meta["batch_dims"] for n in graph.calls() if n.meta["phase"] == "forward"}


def test_rows_through_views_and_permutations() -> None:
    def forward(m: Model, x: Tensor) -> Tensor:
        y = m.lin(x).flatten(0, 1)  # rows times 2
        z = y.unflatten(0, (-1, 2)).transpose(0, 1)
        return z.sum(1).sum()

    rows = rows_of(forward, ranks=2)
    assert rows["transpose"] == ((1,),)
    assert [rows[name] for name in ("sum_1", "sum_2")] == [((),), ((),)]
    assert (((0,),)) in [rows[name] for name in rows if name.startswith("view")]


def test_rows_of_pairs_and_of_results_that_are_several() -> None:
    rows = rows_of(lambda m, x: (x[:, 0] @ x[:, 0].T).max(1)[0].mean() + loss(m, x), ranks=2)
    assert rows["mm"] == ((0,),)
    assert rows["max_1"] == ((0,), (0,))


def test_a_branch_for_compilers_that_fails_is_not_taken() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        mask = None if torch.compiler.is_compiling() else torch.ones_like(x)
        return (model.lin(x) * mask).sum()

    model = Model(forward)
    results = run(model, captured(model).graph, X)
    torch.testing.assert_close(results[Output(0)], model(X))


def test_a_model_that_cannot_run_on_other_rows() -> None:
    """It is captured at the whole batch, and at no other number of rows."""
    forward = lambda m, x: m.lin(x.unflatten(0, (-1, 2))).mean()  # noqa: E731
    x = torch.randn(8, 4)
    graph = World(Model(forward), ((x,), {}), 2).graph(0)
    assert graph.notes == ()
