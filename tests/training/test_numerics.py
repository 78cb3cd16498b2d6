"""Precision, random numbers and compiled code: what changes how a plan computes."""

import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.session.inspect import program_text
from tests.harness.models import MODELS
from tests.harness.reference import relative_error, to_dtype
from tests.harness.training import SGD, Pair, close, fixed, whole_state
from tests.harness.worlds import run

f32, f64 = torch.float32, torch.float64


# -- autocast and GradScaler -------------------------------------------------------------------


def bf16() -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def autocast(rank: int, world_size: int) -> None:
    """By `precision` or by the caller's autocast, as the plain model under autocast."""
    inside = Pair("gpt", dtype=f32, precision="bf16")
    around = Pair("gpt", dtype=f32, zero=2)
    plain32 = MODELS["gpt"].make()
    for seed in range(3):
        args, _ = MODELS["gpt"].batch(6, seed)
        with bf16():
            want = inside.plain(*args)
            ambient = around.parallel(*args)
        have = inside.parallel(*args)
        for loss in (want, have, ambient):
            loss.backward()
        assert relative_error(have, want) < 2**-8
        assert relative_error(ambient, have) < 1e-6
        if seed == 0:
            assert 0 < relative_error(have, plain32(*args)) < 2**-5
        inside.check_gradients(2**-4)
        inside.step()
        around.step()
    inside.check_state(2**-6)
    close(whole_state(around.parallel), whole_state(inside.parallel), 1e-5)
    assert inside.parallel.plan.precision == "bfloat16"
    text = program_text(MODELS["gpt"].make(), args, plan=inside.parallel.plan, rank=rank)
    assert "bfloat16" in text


@pytest.mark.slow
def test_bfloat16_by_autocast() -> None:
    run(autocast, 2)


def reduced_in_bf16(rank: int, world_size: int) -> None:
    """Buckets of gradients that travel in bf16, of whole and of sharded parameters."""
    for zero, more in ((0, {}), (3, {}), (3, {"dp_shard": 2})):
        strategy = replace(fixed(zero), reduce_precision="bf16", **more)
        pair = Pair("gpt", dtype=f32, strategy=strategy)
        args, _ = MODELS["gpt"].batch(8, 0)
        for model in pair.models:
            model(*args).backward()
        assert any("reduced in bfloat16" in note for note in pair.parallel.plan.notes)
        pair.check_gradients(2**-6)


@pytest.mark.slow
def test_gradients_are_reduced_in_bfloat16() -> None:
    run(reduced_in_bf16, 4)


class Float32Island(nn.Module):
    """A layer outside of autocast between two inside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        with torch.autocast("cpu", enabled=False):
            x = self.layers[1](x.float()).tanh()
        return self.layers[2](x).square().mean()


def test_a_backward_is_outside_of_autocast() -> None:
    pair = Pair(Float32Island, dtype=f32, precision="bf16")
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    with bf16():
        loss = pair.plain(x)
    loss.backward()
    pair.parallel(x).backward()
    pair.check_gradients(0.0)


class NormedRows(nn.Module):
    """Batch norm with float32 parameters over rows in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x).tanh())).square().mean()


def norm_under_autocast(rank: int, world_size: int) -> None:
    pair = Pair(NormedRows, dtype=f32, precision="bf16")
    for seed in range(2):
        x = torch.randn(8 - seed, 8, generator=torch.Generator().manual_seed(seed))
        with bf16():
            loss = pair.plain(x)
        loss.backward()
        pair.parallel(x).backward()
        pair.check_gradients(2**-5)
        pair.step()
    pair.check_state(2**-8)


def test_batch_norm_under_autocast_on_two_ranks() -> None:
    run(norm_under_autocast, 2)


def scale(rank: int, world_size: int) -> None:
    """An overflow in one rank's part makes all skip the step, as the plain model does."""
    for zero in (0, 3):
        pair = Pair("encoder", zero=zero)
        scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in pair.models]
        for seed in range(3):
            for model, optimizer, scaler in zip(pair.models, pair.optimizers, scalers, strict=True):
                args, kwargs = to_dtype(MODELS["encoder"].batch(5, seed), f64)
                scaler.scale(model(*args, **kwargs)["loss"]).backward()
                if seed == 1:
                    spoil(model.pooler.weight.grad)
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            assert scalers[1].get_scale() == scalers[0].get_scale() == 1024.0 / (1 + (seed > 0))
        pair.check_state()


def spoil(gradient: Tensor) -> None:
    """Puts an infinity into the last row, which only the last rank holds of a shard."""
    if isinstance(gradient, torch.distributed.tensor.DTensor):
        local = gradient.to_local()
        last = gradient.device_mesh.get_local_rank() == gradient.device_mesh.size() - 1
        if last or gradient.placements[0].is_replicate():
            local[-1] = torch.inf
    else:
        gradient[-1] = torch.inf


@pytest.mark.slow
def test_gradients_can_be_scaled() -> None:
    run(scale, 2)


# -- dropout -----------------------------------------------------------------------------------


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x * self.gain, 0.25, self.training)


def draw(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    model = autopar.compile(Noisy(), strategy=fixed(3), batch="local")
    x = torch.ones(100, 50)
    before = torch.get_rng_state()
    first, second = model(x), model(x)
    assert torch.equal(before, torch.get_rng_state())  # the caller's numbers are left alone
    assert torch.equal(model.eval()(x), x)
    return first.detach(), second.detach()


def test_dropout_masks_are_independent_and_right_on_average() -> None:
    answers = run(draw, 3)
    masks = [mask for pair in answers for mask in pair]
    for mask in masks:
        assert mask.unique().tolist() == [0.0, pytest.approx(4 / 3)]
        assert (mask == 0).float().mean().item() == pytest.approx(0.25, abs=0.03)
    for i, one in enumerate(masks):
        for other in masks[:i]:
            both = ((one == 0) & (other == 0)).float().mean().item()
            assert both == pytest.approx(0.25**2, abs=0.02)


def lose(model: nn.Module, steps: range) -> list[float]:
    optimizer = SGD(model.parameters())
    losses = []
    for seed in steps:
        loss = model(*MODELS["dropout"].batch(6, seed)[0])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def repeat(rank: int, world_size: int) -> None:
    def train(seed: int, level: str, zero: int = 3) -> tuple[list[float], Any]:
        torch.manual_seed(seed + 10 * rank)  # the seed of rank 0 counts
        model = MODELS["dropout"].make().double()
        compiled = autopar.compile(model, strategy=fixed(zero, level))
        return lose(compiled, range(3)), compiled

    losses, model = train(1, "none")
    close(torch.tensor(train(1, "full", zero=1)[0]), torch.tensor(losses))  # draws the same again
    assert train(2, "none")[0] != losses
    state = model.rng_state
    parameters = whole_state(model)
    following = lose(model, range(3, 6))
    model.load_state_dict(parameters)
    assert lose(model, range(3, 6)) != following
    model.load_state_dict(parameters)
    model.rng_state = state
    assert lose(model, range(3, 6)) == following


@pytest.mark.slow
def test_dropout_repeats_from_a_seed_and_from_a_saved_state() -> None:
    run(repeat, 2)


def test_dropout_on_one_rank_is_the_plain_models() -> None:
    losses = []
    for compiled in (False, True):
        torch.manual_seed(3)
        model = MODELS["dropout"].make()
        model = autopar.compile(model, strategy=fixed()) if compiled else model
        losses.append(lose(model, range(3)))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


# -- compiled code -----------------------------------------------------------------------------


def compile_with_inductor(rank: int, world_size: int) -> None:
    pair = Pair("odd", zero=3, backend="inductor")
    for seed in range(3):
        for model in pair.models:
            args, kwargs = to_dtype(MODELS["odd"].batch(6, seed), f64)
            model(*args, **kwargs)["losses"][0].backward()
        pair.check_gradients()
        pair.step()
    pair.check_state()


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")
def test_inductor() -> None:
    run(compile_with_inductor, 2, timeout=400)


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")
def test_inductor_backward_twice() -> None:
    """What a backward may overwrite is kept where the graph is kept."""
    plain, model = (MODELS["gpt"].make().double() for _ in range(2))
    model.load_state_dict(plain.state_dict())
    compiled = autopar.compile(model, strategy=fixed(), backend="inductor")
    args, kwargs = to_dtype(MODELS["gpt"].batch(6, 0), f64)
    for it in (plain, compiled):
        loss = it(*args, **kwargs)
        loss.backward(retain_graph=True)
        loss.backward()
    gradients = [{n: p.grad for n, p in it.named_parameters()} for it in (compiled, plain)]
    close(*gradients)
