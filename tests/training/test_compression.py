"""Training with compressed communication on real ranks, and the plans that say so."""

import contextlib
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import autopar
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.collectives import Link
from tests.harness.training import fixed, whole
from tests.harness.worlds import run


class Net(nn.Module):
    """Enough layers for several buckets."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return (x - y).square().mean()


def batch(width: int = 64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(12, width, generator=generator) for _ in range(2))
    return x, y


def compiled(strategy: autopar.Strategy) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = autopar.compile(Net(), strategy=strategy, example_inputs=batch())
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(*batch())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def compressing(text: str, zero: int = 0, **options: Any) -> autopar.Strategy:
    return fixed(zero, compress=text, **{"reduce_bytes": 1 << 15, **options})


# -- training ----------------------------------------------------------------------------------


def every_method(rank: int, world_size: int) -> None:
    """The loss falls as without; in int8 by as much. Saved and loaded it goes on."""
    before = train(*compiled(compressing("none")), 12)
    for number, method in enumerate(("int8", "powersgd", "randomk", "sign", "topk")):
        strategy = compressing(method, zero=(0, 1, 2, 3)[number % 4])
        model, optimizer = compiled(strategy)
        losses = train(model, optimizer, 6)
        state = get_state_dict(model, optimizer)
        copies = torch.utils._pytree.tree_map(
            lambda x: x.detach().clone() if isinstance(x, Tensor) else x, state
        )
        losses += train(model, optimizer, 6)
        assert losses[-1] < losses[0] * 0.99
        if method == "int8":
            assert losses[-1] == pytest.approx(before[-1], rel=1e-3)
        if not any("_extra_state" in name for name in state[0]):
            continue
        again, other = compiled(strategy)
        set_state_dict(again, other, model_state_dict=copies[0], optim_state_dict=copies[1])
        assert train(again, other, 6) == losses[6:], method


@pytest.mark.slow
def test_every_method_trains_and_resumes() -> None:
    run(every_method, 2)


def through_inductor(rank: int, world_size: int) -> None:
    """What inductor makes of encoding and decoding does the same."""
    strategy = compressing("int8(feedback=True)", reduce_bytes=1 << 20)
    want = train(*compiled(strategy), 3)
    model = autopar.compile(Net(), strategy=strategy, example_inputs=batch(), backend="inductor")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert train(model, optimizer, 3) == pytest.approx(want, rel=1e-5)


@pytest.mark.slow
def test_compression_through_inductor() -> None:
    run(through_inductor, 2)


def other_numbers_of_ranks(rank: int, world_size: int) -> None:
    """What was saved by more ranks keeps its sum; what does not fit is said and starts anew."""
    model, optimizer = compiled(compressing("topk(density=0.1)"))
    train(model, optimizer, 2)
    full = {name: whole(value) for name, value in model.state_dict().items() if "." in name}
    kept = {k: whole(v) for k, v in model.state_dict()["_extra_state"].items()}
    names = [name for name in kept if name.startswith("residual.")]
    doubled = {name: torch.cat([kept[name], kept[name]]) for name in names}
    mesh = f"{kept['mesh'].partition('=')[0]}={2 * world_size}"
    model.load_state_dict({**full, "_extra_state": {**doubled, "mesh": mesh}})
    now = model.state_dict()["_extra_state"]
    for name in names:
        assert torch.allclose(whole(now[name]).sum(0), 2 * kept[name].sum(0), atol=1e-6)
    told = pytest.warns(autopar.LossyWarning, match="starts anew for 6 of 6 states")
    with told if rank == 0 else contextlib.nullcontext():
        model.load_state_dict(full)
    assert not any(whole(model.state_dict()["_extra_state"][n]).any() for n in names)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain_model, _ = compiled(compressing("none"))
        plain_model.load_state_dict(full)


def test_residuals_move_between_numbers_of_ranks() -> None:
    run(other_numbers_of_ranks, 2)


def overflow(rank: int, world_size: int) -> None:
    """GradScaler sees an overflow behind every method, skips the step, and training goes on."""
    for method in ("int8", "sign", "powersgd", "topk"):
        model, optimizer = compiled(compressing(method))
        train(model, optimizer, 1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
        saved = model.state_dict()
        before = {n: whole(v) for n, v in saved.items() if n != "_extra_state"}
        kept = {n: whole(v) for n, v in saved.get("_extra_state", {}).items()}
        loss = model(*batch())
        optimizer.zero_grad()
        scaler.scale(loss * 1e4).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() < 2.0**127, method
        after = model.state_dict()
        assert all(whole(after[name]).equal(value) for name, value in before.items())
        for name, value in kept.items():
            now = whole(after["_extra_state"][name])
            assert value == now if isinstance(value, str) else now.equal(value), (method, name)


def test_overflow_is_seen_behind_compression() -> None:
    run(overflow, 2)


def narrow(rank: int, world_size: int) -> None:
    """Parameters and activations in fewer bytes: near the plain run, and fewer bytes."""
    plain_run, _ = compiled(fixed(3))
    want = train(*compiled(fixed(3)), 6)
    tp, pp = {"tp": 2}, {"pp": 2, "micro_batches": 2, "schedule": "1f1b"}
    for strategy, sizes in (
        (fixed(3, compress_gathers="int8"), dict(plain_run.plan.sent_bytes)),
        (fixed(3, compress_gathers="bf16", compress="bf16"), dict(plain_run.plan.sent_bytes)),
        (fixed(0, **tp, compress_activations="bf16"), sent(fixed(0, **tp))),
        (fixed(0, **pp, compress_activations="fp16"), sent(fixed(0, **pp))),
    ):
        model, optimizer = compiled(strategy)
        assert train(model, optimizer, 6) == pytest.approx(want, rel=5e-3)
        now = dict(model.plan.sent_bytes)
        assert sum(now.values()) < 0.75 * sum(sizes.values()), strategy


def sent(strategy: autopar.Strategy) -> dict[str, int]:
    return dict(compiled(strategy)[0].plan.sent_bytes)


@pytest.mark.slow
def test_parameters_and_activations_are_sent_in_fewer_bytes() -> None:
    run(narrow, 2)


def held_back(rank: int, world_size: int) -> None:
    """Gradients held by no_sync are compressed once, with those of the call that reduces."""
    model, _ = compiled(compressing("int8"))
    other, _ = compiled(compressing("none"))
    for it in (model, other):
        with it.no_sync():
            it(*batch()).backward()
        it(*batch()).backward()
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert all(
        torch.allclose(a.grad, b.grad, atol=0.02 * float(b.grad.abs().max())) for a, b in pairs
    )


def test_no_sync_compresses_once() -> None:
    run(held_back, 2)


# -- plans -------------------------------------------------------------------------------------


def slow(ranks: int) -> Cluster:
    """Ranks on nodes of their own, far apart."""
    return replace(
        Cluster.default(ranks, "cpu"), link=Link(0.0, 1e-5, 1e6), ranks_per_node=1, name="slow"
    )


def planned(**options: Any) -> autopar.Plan:
    options = {"strategy": "ddp", "cluster": slow(2), **options}
    return autopar.plan(Net(256), 2, example_inputs=batch(256), **options)


def test_nothing_lossy_is_chosen_unasked() -> None:
    assert not planned().compressions


@pytest.mark.slow
def test_lossy_lets_the_planner_compress_where_it_pays() -> None:
    plan = planned(lossy=True)
    assert set(plan.compressions.reduce) == {"int8"}
    assert "gradients are compressed, which is lossy: int8" in str(plan)
    assert autopar.Plan.from_dict(plan.to_dict()) == plan
    whole_bytes = dict(planned().sent_bytes)["dp"]
    assert whole_bytes / dict(plan.sent_bytes)["dp"] > 3.8
    assert plan.prediction is not None
    assert plan.prediction.node_bytes == pytest.approx(dict(plan.sent_bytes)["dp"], rel=0.05)
    fast = replace(slow(2), link=Link(0.0, 0.0, 1e15))
    assert not planned(lossy=True, cluster=fast).compressions


def test_lossy_names_methods() -> None:
    assert set(planned(lossy=["topk(density=0.001)"]).compressions.reduce) == {
        "topk(density=0.001)"
    }
    with pytest.raises(autopar.StrategyError, match="give True, False, or a list"):
        planned(lossy="topk")
    with pytest.raises(autopar.StrategyError, match="write one of bf16"):
        planned(lossy=["int4"])
    with pytest.raises(autopar.StrategyError, match="compress_gathers='sign': choose bf16"):
        autopar.Strategy(compress_gathers="sign")
