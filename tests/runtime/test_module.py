"""A compiled model does in a training script what the plain one does."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from tests.harness.models import MODELS
from tests.harness.reference import to_dtype
from tests.harness.training import Pair, close, fixed, whole_state
from tests.harness.worlds import run

f64 = torch.float64


def batch_of(name: str, rows: int, seed: int, dtype: torch.dtype = f64) -> Any:
    return to_dtype(MODELS[name].batch(rows, seed), dtype)


def own_rows(rank: int, world_size: int, value: Tensor) -> Tensor:
    """A rank's rows under batch="global"."""
    return value.tensor_split(world_size)[rank]


class Regressor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def make_regressor() -> nn.Module:
    torch.manual_seed(2)
    return Regressor()


def regression(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(seed)
    shapes = (rows, 6), (rows, 3)
    x, y = (torch.randn(s, generator=gen, dtype=f64) for s in shapes)
    return x, y


def regress(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The loss, which the compiled model computes inside."""
    inside = isinstance(model, autopar.DistributedModule)
    return model(x, y) if inside else F.mse_loss(model(x), y)


MIXED = {"": 0, "layers.0": 3, "layers.2": 1}


# -- shapes and modes --------------------------------------------------------------------------


def change_shapes(rank: int, world_size: int) -> None:
    pair = Pair("odd")
    sizes = [(8, 12), (8, 12), (5, 12), (8, 7), (3, 5), (8, 12)]
    for seed, (rows, length) in enumerate(sizes):
        (x,), options = batch_of("odd", rows, seed)
        cut = {k: options[k][:, :length].contiguous() for k in ("targets", "mask")}
        for model in pair.models:
            out = model(x[:, :length].contiguous(), **cut, extra=options["extra"])
            out["losses"][0].backward()
        pair.check_gradients()
        pair.step()
    pair.check_state()


def test_shapes_may_change_between_steps() -> None:
    run(change_shapes, 2)


def evaluate_between(rank: int, world_size: int) -> None:
    pair = Pair("conv")
    for seed in range(4):
        for model in pair.models:
            args, _ = batch_of("conv", 7, seed)
            model.train()(*args).backward()
        pair.step()
        args, _ = batch_of("conv", 5, seed + 9)
        with torch.no_grad():
            want, have = (model.eval()(*args) for model in pair.models)
        assert not have.requires_grad
        close(have, want)
        want, have = (model.eval()(*args) for model in pair.models)  # gradients in eval mode
        close(have, want)
        want.backward(), have.backward()
        pair.check_gradients()
        pair.step()
    assert not pair.parallel.norm1.training
    pair.check_state()


def test_evaluation_between_steps() -> None:
    run(evaluate_between, 2)


def infer(rank: int, world_size: int) -> None:
    """Under inference_mode, before the first step and after it."""
    pair = Pair(make_regressor, loss_fn=F.mse_loss)
    for seed in range(2):
        with torch.inference_mode():
            want, have = (regress(model, *regression(5, seed)) for model in pair.models)
            close(have, want)
        for model in pair.models:
            regress(model, *regression(5, seed)).backward()
        pair.check_gradients()
        pair.step()


def test_inference_mode() -> None:
    run(infer, 2)


class Tagger(nn.Module):
    """Takes and returns containers; without targets there is no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))

    def forward(self, batch: dict[str, Any], *, scale: float = 1.0) -> dict[str, Any]:
        y = self.layers(batch["x"]) * scale
        out: dict[str, Any] = {"y": y, "pair": (y.sum(-1), None), "scale": scale}
        if "target" in batch:
            out["losses"] = [F.mse_loss(y, batch["target"])]
        return out


def make_tagger() -> nn.Module:
    torch.manual_seed(1)
    return Tagger()


def nest(rank: int, world_size: int) -> None:
    pair = Pair(make_tagger, zero=1)
    x, target = torch.randn(5, 6, dtype=f64), torch.randn(5, 6, dtype=f64)
    for scale in (1.0, 0.5):
        want, have = (m({"x": x, "target": target}, scale=scale) for m in pair.models)
        assert have.keys() == want.keys()
        assert have["scale"] == scale
        assert have["pair"][1] is None
        close(have["losses"][0], want["losses"][0])
        close(have["y"], want["y"])
        close(have["pair"][0], want["pair"][0])
        want["losses"][0].backward(), have["losses"][0].backward()
        pair.check_gradients()
        pair.step()
    with torch.no_grad():
        have = pair.parallel({"x": x})
    assert have.keys() == {"y", "pair", "scale"}
    close(have["y"], pair.plain({"x": x})["y"])


def test_containers_go_in_and_out() -> None:
    run(nest, 2)


# -- what it looks like ------------------------------------------------------------------------


def look(rank: int, world_size: int) -> None:
    pair = Pair("gpt", zero=3)
    plain, parallel = pair.models
    assert isinstance(parallel, autopar.DistributedModule)
    args, _ = batch_of("gpt", 4, 0)
    before = list(parallel.parameters())
    parallel(*args)
    assert all(a is b for a, b in zip(before, parallel.parameters(), strict=True))
    assert [n for n, _ in parallel.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert parallel.head.weight is parallel.embedding.token.weight
    assert len(parallel.blocks) == 2
    assert parallel.plan.world_size == world_size
    assert parallel.mesh.size() == parallel.data_parallel_size == world_size
    assert parallel.data_parallel_rank == rank
    held = sum(p.to_local().numel() for p in parallel.parameters())
    whole_count = sum(p.numel() for p in plain.parameters())
    assert held < 0.6 * whole_count
    close(whole_state(parallel), plain.state_dict(), 0)


def test_it_looks_like_the_model() -> None:
    run(look, 2)


def average(rank: int, world_size: int) -> None:
    """A copy has parameters of its own; torch's averages of weights are made by copying."""
    pair = Pair(make_regressor, loss_fn=F.mse_loss)
    averages = []
    for model in pair.models:
        regress(model, *regression(5, 0)).backward()
    pair.step()
    for model in pair.models:
        averages.append(torch.optim.swa_utils.AveragedModel(model))
        averages[-1].update_parameters(model)
    for model in pair.models:
        regress(model, *regression(5, 1)).backward()
    pair.step()
    for model, averaged in zip(pair.models, averages, strict=True):
        averaged.update_parameters(model)
    close(whole_state(averages[1].module), whole_state(averages[0].module))
    x, y = regression(5, 2)
    close(averages[1](x, y), F.mse_loss(averages[0](x), y))
    pair.check_state()


def test_weights_can_be_averaged() -> None:
    run(average, 2)


def use_channels_last(rank: int, world_size: int) -> None:
    for zero in (0, 3):
        pair = Pair(lambda: MODELS["conv"].make().to(memory_format=torch.channels_last), zero=zero)
        for seed in range(2):
            images, labels = batch_of("conv", 6, seed)[0]
            if zero == 0:  # else the weights alone are channels-last
                images = images.to(memory_format=torch.channels_last)
            for model in pair.models:
                model(images, labels).backward()
            pair.check_gradients()
            pair.step()
        pair.check_state()


@pytest.mark.slow
def test_channels_last() -> None:
    run(use_channels_last, 2)


def build_on_meta(rank: int, world_size: int) -> tuple[float, dict[str, Tensor]]:
    with torch.device("meta"):
        model = Regressor()
    torch.manual_seed(rank)  # ranks draw different values; all get those of rank 0
    parallel = autopar.compile(model, strategy=fixed(3), loss_fn=F.mse_loss)
    x, y = (v.float() for v in regression(6, 0))
    loss = parallel(x, y)
    loss.backward()
    return loss.item(), whole_state(parallel)


def test_models_on_the_meta_device_get_values() -> None:
    (loss, state), (other_loss, other) = run(build_on_meta, 2)
    assert loss == other_loss
    close(state, other, 0)
    assert state["layers.0.weight"].std() > 0.1
    with torch.device("meta"):
        model = Regressor()
    model.load_state_dict(state, assign=True)
    x, y = (v.float() for v in regression(6, 0))
    assert F.mse_loss(model(x), y).item() == pytest.approx(loss, rel=1e-5)


class ReturnsDetached(nn.Module):
    """Returns its loss, and detached copies of all that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        loss = (self.linear(x) * self.scale).square().mean()
        return loss, loss.detach(), x.detach(), self.scale.detach(), self.linear.weight.detach()


def test_detached_copies_of_results_and_inputs() -> None:
    plain, x = ReturnsDetached(), torch.randn(4, 4)
    model = autopar.compile(copy.deepcopy(plain))
    found, want = model(x), plain(x)
    assert [value.requires_grad for value in found] == [True, False, False, False, False]
    for value, expected in zip(found, want, strict=True):
        torch.testing.assert_close(value, expected)
    found[0].backward()
    want[0].backward()
    torch.testing.assert_close(model.linear.weight.grad, plain.linear.weight.grad)


def test_planning_draws_no_numbers_of_the_loop() -> None:
    model = autopar.compile(ReturnsDetached())
    make_plan = model._execution.make_plan
    model._execution.make_plan = lambda *args: make_plan(*args) if len(torch.rand(1)) else None
    before = torch.get_rng_state()
    model(torch.zeros(4, 4))
    assert torch.equal(torch.get_rng_state(), before)
