"""A compiled model does in a training script what the plain one does."""

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from tests.models import MODELS, to_dtype
from tests.training import Pair, close, fixed, rows_of, whole, whole_state
from tests.worlds import run

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
        close(have["y"], own_rows(rank, world_size, want["y"]))
        close(have["pair"][0], own_rows(rank, world_size, want["pair"][0]))
        want["losses"][0].backward(), have["losses"][0].backward()
        pair.check_gradients()
        pair.step()
    with torch.no_grad():
        have = pair.parallel({"x": x})
    assert have.keys() == {"y", "pair", "scale"}
    close(have["y"], own_rows(rank, world_size, pair.plain({"x": x})["y"]))


def test_containers_go_in_and_out() -> None:
    run(nest, 2)


# -- gradients ---------------------------------------------------------------------------------


def clip(rank: int, world_size: int) -> None:
    for zero in (0, 3, MIXED):
        pair = Pair(make_regressor, zero=zero, loss_fn=F.mse_loss)
        for seed in range(3):
            norms = []
            for model in pair.models:
                regress(model, *regression(5, seed)).backward()
                norms.append(whole(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
            close(norms[1], norms[0])
            pair.check_gradients()
            pair.step()
        pair.check_state()


def test_gradients_can_be_clipped() -> None:
    run(clip, 2)


def check_presence(rank: int, world_size: int) -> None:
    for zero in (0, 3):
        pair = Pair("odd", zero=zero)
        for model in pair.models:
            args, kwargs = batch_of("odd", 5, 0)
            model(*args, **kwargs)["losses"][0].backward()
        _, have = pair.gradients()
        without = {name for name, gradient in have.items() if gradient is None}
        assert without == {"frozen.weight", "frozen.bias", "unused.weight", "unused.bias"}
        pair.check_gradients()


def test_frozen_and_unused_parameters_get_no_gradient() -> None:
    run(check_presence, 2)


def freeze_later(rank: int, world_size: int) -> None:
    pair = Pair(make_regressor, loss_fn=F.mse_loss)
    for seed in range(4):
        for model in pair.models:
            regress(model, *regression(5, seed)).backward()
        pair.check_gradients()
        pair.step()
        for model in pair.models:
            model.layers[0].requires_grad_(seed == 2)
    pair.check_state()


def test_parameters_may_be_frozen_between_steps() -> None:
    run(freeze_later, 2)


def hook(rank: int, world_size: int) -> None:
    """Hooks that were set before the plan was made go on working."""
    pair = Pair(make_regressor, loss_fn=F.mse_loss)
    seen: list[Any] = []
    for model in pair.models:
        model.layers[0].weight.register_hook(lambda gradient: gradient * 2)
        handle = model.layers[2].weight.register_hook(lambda gradient: gradient * 3)
        model.layers[2].bias.register_post_accumulate_grad_hook(seen.append)
        for _ in range(2):
            regress(model, *regression(5, 0)).backward()
            handle.remove()
    pair.check_gradients()
    assert len(seen) == 4


def test_hooks_of_parameters_stay() -> None:
    run(hook, 2)


def accumulate(rank: int, world_size: int) -> None:
    """Each backward reduces, as under DDP without no_sync."""
    for zero in (0, 1, 2, 3):
        pair = Pair(make_regressor, zero=zero, loss_fn=F.mse_loss)
        for seed in range(3):
            for model in pair.models:
                (regress(model, *regression(5, seed)) / 3).backward()
        pair.check_gradients()


def test_gradients_accumulate() -> None:
    run(accumulate, 2)


class Traffic(TorchDispatchMode):
    """Counts the collectives that run."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        self.count += "c10d" in name and "wait" not in name and type(args[0]) is Tensor
        return func(*args, **(kwargs or {}))


def hold_back(rank: int, world_size: int) -> None:
    """Four micro-steps, three of them under no_sync, are one big step that reduces once."""
    for zero in (0, 1, 2, 3):
        pair = Pair(make_regressor, zero=zero, loss_fn=F.mse_loss)
        plain, parallel = pair.models
        for step in range(2):
            x, y = regression(16, step)
            regress(plain, x, y).backward()
            counts = []
            for index, part in enumerate(zip(x.chunk(4), y.chunk(4), strict=True)):
                last = index == 3
                with contextlib.nullcontext() if last else parallel.no_sync():
                    loss = parallel(*part) / 4
                    with Traffic() as traffic:
                        loss.backward()
                counts.append(traffic.count)
                assert (parallel.layers[0].weight.grad is not None) == last
            gathers = counts[0]
            assert zero == 3 or not gathers
            assert counts == [gathers] * 3 + [gathers + 1]
            pair.check_gradients()
            pair.step()
        pair.check_state()


def test_no_sync_reduces_once() -> None:
    run(hold_back, 2)


def hold_unevenly(rank: int, world_size: int) -> None:
    """Micro-batches of other sizes, a backward outside of the context, a parameter not used."""
    pair = Pair("odd", zero=2)
    plain, parallel = pair.models
    for seed, rows in enumerate([4, 6, 5]):
        args, kwargs = batch_of("odd", rows, seed)
        plain(*args, **kwargs)["losses"][0].backward()
        if seed < 2:
            with parallel.no_sync():
                loss = parallel(*args, **kwargs)["losses"][0]
        else:
            loss = parallel(*args, **kwargs)["losses"][0]
        loss.backward()
    pair.check_gradients()


def test_no_sync_with_uneven_micro_batches() -> None:
    run(hold_unevenly, 2)


def go_back_twice(rank: int, world_size: int) -> None:
    pair = Pair(make_regressor, loss_fn=F.mse_loss)
    losses = [regress(model, *regression(4, 0)) for model in pair.models]
    for loss in losses:
        loss.backward(retain_graph=True)
        loss.backward()
    pair.check_gradients()
    for loss in losses:
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


def test_backward_twice() -> None:
    run(go_back_twice, 2)


def keep_two_graphs(rank: int, world_size: int) -> None:
    """Two forwards before their backwards, in the other order."""
    pair = Pair(make_regressor, loss_fn=F.mse_loss)
    for model in pair.models:
        first, second = (regress(model, *regression(4, seed)) for seed in (0, 1))
        (second * 2).backward()
        first.backward()
    pair.check_gradients()


def test_two_calls_under_way() -> None:
    run(keep_two_graphs, 2)


# -- losses made elsewhere ---------------------------------------------------------------------


def loss_outside(rank: int, world_size: int) -> None:
    """As under DDP: each rank's loss is of its own rows, gradients are means over the ranks."""
    for zero in (0, 3):
        pair = Pair(make_regressor, zero=zero, batch="local")
        pair.plain = DistributedDataParallel(pair.plain)
        for seed in range(3):
            x, y = regression(4, 10 * seed + rank)
            x.requires_grad_()
            for model in pair.models:
                F.mse_loss(model(x), y).backward()
            pair.step()
        for have, want in zip(pair.parallel.parameters(), pair.plain.parameters(), strict=True):
            close(have, want)


def test_loss_outside_of_the_model_is_as_under_ddp() -> None:
    run(loss_outside, 2)


def mix_losses(rank: int, world_size: int) -> None:
    """The loss is made of a returned scalar and of returned rows."""
    for zero, level in ((0, "none"), (3, "full")):
        pair = Pair(make_tagger, strategy=fixed(zero, level))
        for seed in range(4):
            x, target = (torch.randn(6, 6, dtype=f64) for _ in range(2))
            for model in pair.models:
                out = model({"x": x, "target": target})
                loss = out["losses"][0]
                (loss + 0.1 * out["y"].square().mean() if seed % 3 else loss).backward()
            pair.check_gradients()
            pair.step()
        pair.check_state()


def test_loss_of_returned_scalar_and_rows() -> None:
    run(mix_losses, 2)


def loss_inside(rank: int, world_size: int) -> None:
    for zero, rows in ((0, 7), (3, 7)):
        pair = Pair(make_regressor, zero=zero, loss_fn=F.smooth_l1_loss)
        plain, parallel = pair.models
        for seed in range(3):
            x, y = regression(rows, seed)
            want, have = F.smooth_l1_loss(plain(x), y), parallel(x, y)
            close(have, want)
            want.backward(), have.backward()
            pair.step()
        pair.check_state()


def test_loss_fn_is_part_of_the_graph() -> None:
    run(loss_inside, 2)


def differentiate_inputs(rank: int, world_size: int) -> None:
    pair = Pair(make_regressor, zero=3, batch="local", loss_fn=F.mse_loss)
    x, y = regression(6, 0)
    mine = rows_of(((x, y), {}), rank, world_size)[0]
    x.requires_grad_(), mine[0].requires_grad_()
    F.mse_loss(pair.plain(x), y).backward()
    pair.parallel(*mine).backward()
    close(mine[0].grad, x.grad.chunk(world_size)[rank])
    pair.check_gradients()


def test_inputs_get_gradients() -> None:
    run(differentiate_inputs, 2)


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
            images = images.to(memory_format=torch.channels_last)
            for model in pair.models:
                model(images, labels).backward()
            pair.check_gradients()
            pair.step()
        pair.check_state()


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
