"""Gradients: clipped, accumulated, held back, hooked, and of losses made elsewhere."""

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from autopar.runtime.border.held_gradients import HeldGradient
from tests.harness.training import Pair, close, fixed, rows_of, whole
from tests.harness.worlds import run
from tests.runtime.test_module import (
    MIXED,
    batch_of,
    make_regressor,
    make_tagger,
    regress,
    regression,
)

f64 = torch.float64


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
                assert isinstance(parallel.layers[0].weight.grad, HeldGradient) != last
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
    close(mine[0].grad, world_size * x.grad.chunk(world_size)[rank])  # DDP does not scale it
    pair.check_gradients()


def test_inputs_get_gradients() -> None:
    run(differentiate_inputs, 2)


# -- torch's checkpoint around the model -------------------------------------------------------


def make_normed() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    return nn.Sequential(*layers, nn.Linear(8, 4))


def check_checkpoint(rank: int, world_size: int, sizes: dict[str, int]) -> None:
    pair = Pair(make_normed, strategy=fixed(0, **sizes))
    for seed in range(3):
        x = torch.randn(8, 6, dtype=f64, generator=torch.Generator().manual_seed(seed))
        for model in pair.models:
            checkpoint(model, x, use_reentrant=False).square().mean().backward()
        pair.check_gradients()
        pair.step()
    pair.check_state()  # statistics are taken twice a step


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{}, {"pp": 2, "micro_batches": 1}], ids=["ddp", "pp"])
def test_a_checkpoint_around_the_model_runs_it_again(sizes: dict[str, int]) -> None:
    run(check_checkpoint, 2, sizes=sizes)
