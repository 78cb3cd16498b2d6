"""Blocks that repeat are traced once, and the graph is the one that tracing all of them gives."""

import functools
import itertools
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from autopar.capture import repeated_blocks as repeats
from autopar.capture import trace as capture
from autopar.capture.batch_slices import capture_of_rank
from autopar.core.common.deadline import Deadline, TimeIsOver, arm
from autopar.core.ir.graph import TrainingGraph, tensors
from tests.planner.blocks import GPTBlock, LlamaBlock, Stack


class Numbered(nn.Module):
    """A layer that knows its number, and does with it what `use` says."""

    def __init__(self, number: int, use: str = "") -> None:
        super().__init__()
        self.number, self.use, self.seen = number, use, 0
        self.linear = nn.Linear(8, 8)
        self.act = functools.partial(torch.softmax, dim=-1)
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.use == "number":
            x = x / (self.number + 1)
        if self.use == "attribute":
            self.seen = self.seen + 1
        if self.use == "buffer":
            self.steps.add_(1.0)
        if self.use == "argument":
            x.mul_(2.0)
        return x + self.act(self.linear(x))


class Layers(nn.Module):
    """Layers of which one is skipped over, with a bias that all are given."""

    def __init__(self, use: str = "", depth: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Numbered(i, use) for i in range(depth))
        self.bias = nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        kept = x = x * 1.0
        for number, layer in enumerate(self.layers):
            x = layer(x + self.bias) if number != 3 else layer(x + self.bias) + kept
        return x.square().mean()


class Shared(nn.Module):
    """A block that is given a tensor that needs a gradient, and hands it on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8, 8))
        self.unused = nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor, *, scale: Tensor) -> tuple[Tensor, Tensor | None]:
        return nn.functional.dropout(x @ self.weight, 0.5) * scale, None


class Sharing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Shared() for _ in range(5))
        self.scale = nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, _ = block(x, scale=self.scale)
        return x.square().mean()


class Handed(nn.Module):
    """A block that returns an input beside its result; its weight's gradient is transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 8, 8))

    def forward(self, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return torch.bmm(x, self.weight.transpose(1, 2)) + bias, bias


class Handing(nn.Module):
    """Blocks that hand a bias on to the next; nothing reads the last one's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Handed() for _ in range(5))
        self.bias = nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias * 2.0
        for block in self.blocks:
            x, bias = block(x, bias)
        return x.square().mean()


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "gpt": (lambda: Stack(lambda: GPTBlock(16, 2), 6), (2, 4, 16)),
    "llama": (lambda: Stack(lambda: LlamaBlock(64, 4, 2), 5), (2, 4, 64)),
    "shared": (Sharing, (2, 8)),
    "numbered": (Layers, (2, 8)),
    "handing": (Handing, (4, 2, 8)),
}
UNLIKE = ("number", "attribute", "buffer", "argument")


def traced(model: nn.Module, x: Tensor) -> TrainingGraph:
    return capture_of_rank(model, (x,), 0, 1)


def watched(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Grows whenever a graph is made of copies."""
    expanded: list[bool] = []
    expand = capture.expand

    def watch(graph: fx.Graph) -> None:
        expand(graph)
        expanded.append(True)

    monkeypatch.setattr(capture, "expand", watch)
    return expanded


def run(graph: TrainingGraph, seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    given = [torch.rand(tensors(n)[0].shape, dtype=tensors(n)[0].dtype) for n in graph.placeholders]
    module = fx.GraphModule({}, graph.graph)
    return [t for t in fx.Interpreter(module).run(*given) if t is not None]


@pytest.mark.parametrize("name", MODELS)
def test_the_graph_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, shape = MODELS[name]
    model, x = make(), torch.rand(shape)
    expanded = watched(monkeypatch)
    once = traced(model, x)
    assert expanded == [True]
    monkeypatch.setattr(repeats, "MIN_BLOCKS", 100)
    every = traced(model, x)
    assert (once.inputs, once.outputs) == (every.inputs, every.outputs)
    assert len(list(once.calls())) == len(list(every.calls()))
    for ours, theirs in zip(run(once), run(every), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.stride() == theirs.stride()
    assert places(once) == places(every)


def places(graph: TrainingGraph) -> Counter[tuple[str, str]]:
    """How many operators of each block and phase; sums of gradients are of no block."""
    nodes = (n for n in graph.calls() if n.target is not torch.ops.aten.add.Tensor)
    return Counter((n.meta["block"], n.meta["phase"]) for n in nodes)


def test_a_trace_ends_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "MIN_BLOCKS", 100)
    model, x, calls = Layers(), torch.rand(2, 8), itertools.count()
    deadline = Deadline(1.0, 0.0, lambda: 0.0 if next(calls) < 20 else 2.0)  # asked per operator
    with deadline.enforced():
        arm()
        with pytest.raises(TimeIsOver):
            traced(model, x)


@pytest.mark.parametrize("use", UNLIKE)
def test_what_is_not_alike_is_traced(use: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Layers(use), torch.rand(2, 8)
    expanded = watched(monkeypatch)
    once = traced(model, x)
    assert not expanded
    monkeypatch.setattr(repeats, "MIN_BLOCKS", 100)
    every = traced(model, x)
    for ours, theirs in zip(run(once), run(every), strict=True):
        assert torch.equal(ours, theirs)


class Recurrent(nn.Module):
    """A block with a list of tensors among its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gru(x)[0]


def test_blocks_that_list_tensors_are_traced() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Recurrent() for _ in range(5))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x.square().mean()

    assert {info.block for info in traced(Rows(), torch.rand(2, 3, 8)).parameters.values()}
