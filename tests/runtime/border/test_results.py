"""Results that share memory, results that a loop changes in place, parameters changed too early."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from tests.harness.training import Pair, close, fixed
from tests.harness.worlds import Raised, run

X = torch.arange(48, dtype=torch.float64).view(8, 6).sin()
STRATEGIES = [{"zero": 3}, {"tp": 2}, {"pp": 2, "micro_batches": 2}]
KINDS = {
    "a column": lambda o: (o, o[:, 0]),
    "the column first": lambda o: (o[:, 0], o),
    "transposed": lambda o: (o, o.T),
    "columns": lambda o: (o[:, 0], o[:, 1:]),
    "the same": lambda o: (o, o),
    "one view twice": lambda o: (o.T,) * 2,
    "detached": lambda o: (o.detach(), o),
    "chunks": lambda o: o.chunk(2, -1),
    "parts of complex numbers": lambda o: tuple(torch.view_as_real(torch.complex(o, o)).unbind(-1)),
    "losses": lambda o: (o.mean(), o.mean().view(())),
    "one loss twice": lambda o: (o.square().mean(),) * 2,
}


class Several(nn.Module):
    """Two results that are made of one tensor."""

    def __init__(self, kind: str = "a column") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.first, self.last = kind, nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Any:
        return KINDS[self.kind](self.last(self.first(x).tanh()))


def train_by_both(rank: int, world_size: int, options: dict[str, int], kinds: list[str]) -> None:
    for kind in kinds:
        pair = Pair(lambda kind=kind: Several(kind), strategy=fixed(**{"zero": 0, **options}))
        for model in pair.models:
            one, other = model(X)
            ((one - 1).square().mean() + 3 * other.square().mean()).backward()
        pair.check_gradients()


@pytest.mark.parametrize("kind", KINDS)
def test_results_of_one_tensor_are_both_trained(kind: str) -> None:
    train_by_both(0, 1, {}, [kind])


@pytest.mark.parametrize("options", STRATEGIES, ids=str)
def test_results_of_one_tensor_on_several_ranks(options: dict[str, int]) -> None:
    kinds = ["a column", "columns", "one loss twice"]
    run(train_by_both, 2, options=options, kinds=kinds if "pp" not in options else kinds[:1])


class Remembering(nn.Module):
    """Forward returns a buffer that it has changed, and some rows of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 6)
        self.register_buffer("memory", torch.zeros(6))

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        self.memory.lerp_(y.detach().mean(0), 0.5)
        return y, self.memory, self.memory[:2]


def return_buffers(rank: int, world_size: int) -> None:
    pair = Pair(Remembering, strategy=fixed(3))
    for _ in range(2):
        (y, memory, part), others = (model(X) for model in pair.models)
        for one, other in zip((y, memory, part), others, strict=True):
            close(other, one)
        (y * memory).sum().backward()
        (others[0] * others[1]).sum().backward()
        pair.check_gradients()
        pair.step()
    pair.check_state()


@pytest.mark.parametrize("ranks", [1, 2])
def test_changed_buffers_and_parts_of_them_are_returned(ranks: int) -> None:
    run(return_buffers, ranks)


class Layers(nn.Sequential):
    """Two layers; a buffer shares the memory of a parameter if it is told to."""

    def __init__(self, shares: bool = False) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(6, 6), nn.Linear(6, 6))
        if shares:
            self.register_buffer("anchor", self[0].weight.detach())


def change_results(rank: int, world_size: int, options: dict[str, int]) -> None:
    pair = Pair(Layers, strategy=fixed(**{"zero": 0, **options}))
    for model in pair.models:
        result = model(X)
        result /= 2
        result[:, 0] += 1
        loss = result.square().mean()
        loss /= 4
        loss.backward()
    pair.check_gradients()


@pytest.mark.parametrize("options", [{}, *STRATEGIES, {"pp": 2, "micro_batches": 1}], ids=str)
def test_results_may_be_changed_in_place(options: dict[str, int]) -> None:
    run(change_results, 2, options=options)


def change_early(rank: int, world_size: int) -> None:
    model = autopar.compile(Layers().double(), strategy=fixed(3), fallback=False)
    loss = model(X).square().mean()
    model[1].weight.data.mul_(2)
    loss.backward()


def share_memory(rank: int, world_size: int) -> None:
    autopar.compile(Layers(shares=True), strategy=fixed(3), fallback=False)(X.float())


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (change_early, "changed in place between a call and its backward"),
        (share_memory, "share memory"),
    ],
)
def test_what_shards_cannot_follow_is_refused(act: Any, message: str) -> None:
    for answer in run(act, 2, expect_errors=True):
        assert isinstance(answer, Raised)
        assert answer.type == "StrategyError"
        assert message in answer.message


def load_state(rank: int, world_size: int) -> None:
    """The state of one device's optimizer, loaded when the stages' optimizers have their own."""
    pair = Pair(Layers, strategy=fixed(0, pp=2, micro_batches=2))
    for step in range(3):
        for model in pair.models:
            model(X).square().mean().backward()
        pair.step()
        if step == 0:
            plain, parallel = pair.optimizers
            plain.param_groups[0]["lr"] = 0.03
            parallel.load_state_dict(copy.deepcopy(plain.state_dict()))
    pair.check_state()


def test_stages_take_the_optimizer_state_of_one_device() -> None:
    run(load_state, 2)
