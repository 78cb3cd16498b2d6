"""Programs replayed as CUDA graphs train as they do without; what cannot be recorded is refused."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.core.ir.roles import Input, Output
from autopar.core.operators.random_streams import ON_STREAM
from autopar.errors import StrategyError
from autopar.runtime.codegen import cuda_graphs
from autopar.runtime.codegen.cuda_graphs import check_graph, check_machine, check_strategy
from autopar.session import build_module
from tests.cost_model.sketch import Sketch, aten, c10d
from tests.harness.models import MODELS
from tests.harness.training import fixed
from tests.harness.worlds import run


class Operators(TorchDispatchMode):
    """Stands in for a CUDA graph: its operators, run again on the same memory without Python."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = done(func, func(*args, **(kwargs or {})))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, old in self.calls:
            new = done(func, func(*args, **kwargs))
            for before, now in zip(pytree.tree_leaves(old), pytree.tree_leaves(new), strict=True):
                if isinstance(before, Tensor):
                    before.copy_(now)


def done(func: Any, result: Any) -> Any:
    return c10d.wait_tensor(result) if "_c10d_functional" in str(func) else result


def record(run: Any, arguments: list[Any], pool: Any) -> tuple[Callable[[], None], Any]:
    with torch.random.fork_rng(devices=[]), Operators() as operators:  # CUDA records without a run
        results = run(arguments)
    return operators.replay, results


@pytest.fixture
def graphs_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch.setattr)


def pretend(set_attribute: Callable[[Any, str, Any], object]) -> None:
    """Lets programs of CPUs be recorded, by the stand-in."""
    set_attribute(build_module, "check_machine", lambda *given: None)
    set_attribute(cuda_graphs, "_of_host", lambda node: "")
    set_attribute(cuda_graphs, "record", record)
    set_attribute(torch.cuda, "graph_pool_handle", lambda: None)


def both(name: str, strategy: Any = None) -> list[Any]:
    """A case's model compiled without and with CUDA graphs."""
    strategy, made = strategy or fixed(0), []
    for graphs in (False, True):
        inputs = MODELS[name].batch(4, 0)[0]
        model = MODELS[name].make()
        made.append(
            autopar.compile(model, strategy=strategy, example_inputs=inputs, cuda_graphs=graphs)
        )
    return made


def replays(model: Any) -> list[int]:
    programs = model._execution.executor.programs.values()
    return [half.run.replays for p in programs for half in (p.forward, p.backward) if half]


def train(model: Any, name: str, steps: int, clear: bool = True) -> list[Tensor]:
    """Losses, and the parameters at last."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
    torch.manual_seed(3)
    for step in range(steps):
        loss = MODELS[name].loss(model(*MODELS[name].batch(4, step)[0]))
        loss.backward()
        optimizer.step()
        if clear or step % 2:
            optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(p.detach().clone() for p in model.parameters()), *model.buffers()]


@pytest.mark.parametrize(("name", "clear"), [("gpt", False), ("dropout", True), ("conv", True)])
def test_replays_train_alike(name: str, clear: bool, graphs_on_cpus: None) -> None:
    plain, graphed = both(name)
    wants, found = (train(model, name, 7, clear) for model in (plain, graphed))
    assert all(map(torch.equal, wants, found))
    assert min(replays(graphed)) >= 2


@pytest.mark.slow
def test_a_loss_that_waits_for_its_backward_keeps_its_tensors(graphs_on_cpus: None) -> None:
    found = []
    for model in both("gpt"):
        train(model, "gpt", 6)
        model.zero_grad()
        first, second, third = (model(*MODELS["gpt"].batch(4, seed)[0]) for seed in (7, 8, 9))
        del second
        (first + third).backward()
        kept = model(*MODELS["gpt"].batch(4, 10)[0])
        kept.backward(retain_graph=True)
        model(*MODELS["gpt"].batch(4, 11)[0]).backward()
        kept.backward()
        found.append([p.grad for p in model.parameters()])
        before = sum(replays(model)) if found[1:] else 0
        del first, third, kept
        gc.collect()
        train(model, "gpt", 6)
    assert all(map(torch.equal, *found))
    assert sum(replays(model)) >= before + 6, "a model whose losses are gone is replayed again"


def test_parameters_that_move_are_recorded_again(graphs_on_cpus: None) -> None:
    found = []
    for model in both("gpt"):
        train(model, "gpt", 6)
        model.load_state_dict(model.state_dict())
        for parameter in model.parameters():
            parameter.data = parameter.data.clone() * 1.5
        found.append(train(model, "gpt", 6))
    assert all(map(torch.equal, *found))


def held_back(rank: int, world_size: int, strategy: Any) -> None:
    with pytest.MonkeyPatch.context() as patches:
        pretend(patches.setattr)
        found = []
        for model in both("gpt", strategy):
            losses = train(model, "gpt", 5)
            for step in range(5):
                with model.no_sync():
                    model(*MODELS["gpt"].batch(4, step)[0]).backward()
                model(*MODELS["gpt"].batch(4, step + 50)[0]).backward()
            gradients = [getattr(p.grad, "_local_tensor", p.grad) for p in model.parameters()]
            parameters = [getattr(x, "_local_tensor", x) for x in losses]
            found.append([*parameters, *gradients])
        assert all(map(torch.equal, *found))
        assert max(replays(model)) >= 2


@pytest.mark.slow
def test_ranks_replay_collectives() -> None:
    run(held_back, 2, strategy=fixed(3))


# -- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "backend", "match"),
    [("cpu", "gloo", "is on cpu.*move the model to a GPU"), ("cuda:0", "gloo", "with NCCL")],
)
def test_machines_without_graphs(device: str, backend: str, match: str) -> None:
    with pytest.raises(StrategyError, match=match):
        check_machine(torch.device(device), backend, 2)
    check_machine(torch.device("cuda:0"), "nccl", 2)


@pytest.mark.parametrize("strategy", [autopar.Strategy(pp=2), autopar.Strategy.of("fastest")])
def test_pipelines_are_refused(strategy: autopar.Strategy) -> None:
    with pytest.raises(StrategyError, match="schedule of a pipeline"):
        check_strategy(strategy)
    check_strategy(autopar.Strategy.of("auto"))


def test_compile_refuses_a_cpu() -> None:
    with pytest.raises(StrategyError, match="cuda_graphs=True, but the model is on cpu"):
        autopar.compile(nn.Linear(2, 2), cuda_graphs=True)
    with pytest.raises(StrategyError, match="cuda_graphs"):
        autopar.compile(nn.Linear(2, 2), cuda_graphs="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("target", "device", "match"),
    [
        (aten.nonzero.default, "meta", r"waits for the GPU.* change .*nonzero"),
        (aten._local_scalar_dense.default, "meta", "waits for the GPU"),
        (next(iter(ON_STREAM.values())), "meta", "sets the seed on the host"),
        (c10d.wait_tensor.default, "meta", "starts in the forward and ends in the backward"),
        (aten.cos.default, "cpu", r"a tensor of the program is on the CPU"),
    ],
)
def test_operators_of_the_host_are_named(target: Any, device: str, match: str) -> None:
    g = Sketch()
    call = g.call(aten.sin.default, g.take(Input(0), 3, device=device))
    graph = g.give({Output(0): call})
    if device != "cpu":
        check_graph(graph)
    call.target = target
    with pytest.raises(StrategyError, match=match):
        check_graph(graph)
