"""What models of libraries do around their computation: set up hooks, look up classes, check."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.passes.pipeline import build_pass_pipeline
from tests.capture.test_trace import X, captured, run
from tests.harness.training import SGD, fixed
from tests.harness.worlds import run as run_on_ranks
from tests.passes.parity import World, assert_parity


class Hooked(nn.Module):
    """Collects what its layer computes, by a hook that the first call adds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin, self.seen = nn.Linear(4, 4), ([],)

    def forward(self, x: Tensor) -> Tensor:
        if not getattr(self, "is_hooked", False):
            self.lin.register_forward_hook(lambda module, args, out: self.seen[0].append(out))
            self.is_hooked = True
        self.seen[0].clear()
        self.lin(x)
        (out,) = self.seen[0]
        self.seen[0].clear()
        return out.sum()  # type: ignore[no-any-return]


def test_hooks_of_the_first_call_are_added_once() -> None:
    model = Hooked()
    captured(model, X)
    captured(model, X)
    assert len(model.lin._forward_hooks) == 1
    assert model.is_hooked
    torch.testing.assert_close(model(X), model.lin(X).sum())


def train_hooked(rank: int, world_size: int) -> list[float]:
    """Losses of stages; rows need each other, so a micro-batch and the batch are captured."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Hooked()).double()
    x = torch.randn(4, 4).double()
    if world_size > 1:
        strategy = fixed(pp=2, schedule="1f1b", micro_batches=2)
        model = autopar.compile(model, strategy=strategy, fallback=False)
    optimizer = SGD(model.parameters())
    losses = []
    for _ in range(3):
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_hooks_of_the_first_call_do_not_stop_the_second_capture() -> None:
    want = train_hooked(0, 1)
    assert len(set(want)) == len(want)
    for losses in run_on_ranks(train_hooked, 2):
        assert losses == pytest.approx(want, rel=1e-12)


class Instances(OrderedDict[str, type[nn.Module]]):
    """Classes by name, of which an access makes an instance."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()


ACTIVATIONS = Instances(relu=nn.ReLU, tanh=nn.Tanh)


def test_dicts_that_make_their_values_stay_as_they_are() -> None:
    class Activated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.known = nn.Linear(4, 4), ACTIVATIONS

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.known["tanh"](self.lin(x))
            return made.sum()

    captured(Activated(), X)
    assert OrderedDict.__getitem__(ACTIVATIONS, "tanh") is nn.Tanh


class Placed(nn.Module):
    """Puts features where tokens ask for them, as many as there are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.lin = nn.Embedding(9, 4), nn.Linear(4, 4)

    def forward(self, tokens: Tensor, features: Tensor) -> Tensor:
        here = (tokens == 8)[..., None]
        torch._check_tensor_all(here.sum() * 4 == features.numel())
        hidden = self.words(tokens).masked_scatter(here, self.lin(features))
        return hidden.square().mean()


def placed(rows: int) -> tuple[Tensor, Tensor]:
    """Rows with one or two places, and the features for them."""
    tokens = torch.arange(rows)[:, None].repeat(1, 3)
    tokens[:, 1], tokens[::2, 2] = 8, 8
    return tokens, torch.randn(int((tokens == 8).sum()), 4, dtype=torch.float64)


def test_features_are_placed_by_a_mask() -> None:
    tokens, features = placed(4)
    world = World(Placed().double(), ((tokens,), {"features": features}), ranks=2)
    plan = world.plan(3)
    assert_parity(world, world.lower(lambda rank: build_pass_pipeline(plan, rank, "gloo")))


def test_a_check_that_fails_raises() -> None:
    tokens, features = placed(4)
    features, model = features.float(), Placed()
    graph = captured(model, tokens, features).graph
    run(model, graph, tokens, features)
    with pytest.raises(RuntimeError, match="check of the model failed"):
        run(model, graph, tokens.clamp(max=7), features)
