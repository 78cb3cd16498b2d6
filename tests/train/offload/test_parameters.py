"""Parameters on storage: the plain model's numbers under every kind of plan, and whole states."""

import errno
import gc
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.core.common import block_storage
from autopar.core.operators import offload, parameters
from benchmarks.memoize import memoized_capture
from benchmarks.offload.exactness import everything_leaves, example
from tests.harness.models import MODELS
from tests.harness.reference import batches, reference, snapshot, train_steps, worst_error
from tests.harness.training import ADAMW, assert_same_bits, fixed
from tests.harness.worlds import run

ROWS, STEPS = 8, 3
CAPTURES: dict[Any, Any] = {}
Maker = Any


def away(folder: Any, zero: int = 0, offload: Any = "parameters", **more: Any) -> autopar.Strategy:
    return fixed(zero, offload=offload, offload_dir=str(folder), **more)


def compiled(name: str, strategy: autopar.Strategy, **options: Any) -> Any:
    case = MODELS[name]
    with everything_leaves(), memoized_capture(CAPTURES):
        model = case.make().double()
        inputs = example(model, case)
        return autopar.compile(model, strategy=strategy, example_inputs=inputs, **options)


def trained(
    name: str, strategy: autopar.Strategy, make: Maker = ADAMW, **options: Any
) -> tuple[Any, Any]:
    model = compiled(name, strategy, **options)
    given = batches(MODELS[name], range(STEPS), ROWS)
    with everything_leaves():
        return train_steps(model, make(model.parameters()), MODELS[name], given), model


def train_like_plain(rank: int, world_size: int, folder: str, options: Any) -> None:
    want = reference(MODELS["gpt"], STEPS, torch.float64, ADAMW, ROWS)
    make: Any = ADAMW
    if options.get("offload"):
        stored = {"folder": folder, "block_bytes": 1 << 14, **ADAMW.keywords}
        make = partial(autopar.OffloadedOptimizer, torch.optim.AdamW, **stored)
    before = set(parameters._homes)  # of cases that this process ran
    losses, model = trained("gpt", away(folder, **options), make)
    assert set(parameters._homes) - before, "nothing lies on storage"
    assert losses == pytest.approx(want.losses, rel=1e-9)
    assert worst_error(snapshot(model.full_state_dict()), want.state)[0] <= 1e-9
    assert not parameters._reading, "a read was not waited for"
    del model
    gc.collect()
    assert set(parameters._homes) <= before, "parameters outlive their model"


PLANS: dict[str, Any] = {
    "zero3": {"zero": 3},
    "tp, with all": {"tp": 2, "offload": "activations+parameters"},
    "pp x recompute": {"pp": 2, "micro_batches": 2, "recompute": "selective"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_the_plain_models_numbers(name: str, tmp_path: Path) -> None:
    run(train_like_plain, 2, folder=str(tmp_path), options=PLANS[name])


@pytest.mark.parametrize("name", ["dropout", "conv", "odd"])
def test_bit_for_bit_on_one_rank(name: str, tmp_path: Path) -> None:
    assert_same_bits(partial(trained, name), fixed(0), away(tmp_path))
    assert not list(tmp_path.iterdir()), "the file has no name"


@pytest.mark.slow
def test_inductor_sees_reads_as_new_memory(tmp_path: Path) -> None:
    train = partial(trained, "gpt", backend="inductor")
    assert_same_bits(train, fixed(0), away(tmp_path))


def test_values_that_the_user_sets_are_read(tmp_path: Path) -> None:
    """Parameters change in place, are loaded, and take other memory, as those in memory do."""
    case, models = MODELS["gpt"], [compiled("gpt", s) for s in (fixed(0), away(tmp_path))]
    (args, _) = next(batches(case, [0], ROWS))
    saved = {name: value + 0.1 for name, value in models[0].state_dict().items()}
    losses: list[list[Any]] = [[], []]
    for model, own in zip(models, losses, strict=True):
        with everything_leaves(), torch.no_grad():
            model.norm.weight.mul_(2.0)
            own.append(model(*args))
            model.load_state_dict(saved)
            own.append(model(*args))
            model.head.weight.data = model.head.weight.data * 3.0
            own.append(model(*args))
    torch.testing.assert_close(*losses, rtol=0, atol=0)
    assert len({loss.item() for loss in losses[0]}) == 3


class Wide(nn.Module):
    """Layers of 1 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


@pytest.mark.parametrize("on_meta", [False, True])
def test_weights_leave_memory_and_come_back(on_meta: bool, tmp_path: Path) -> None:
    with torch.device("meta" if on_meta else "cpu"):
        made = Wide()
    x = torch.ones(8, 512)
    make = partial(torch.optim.SGD, lr=0.1)
    model = autopar.compile(made, strategy=away(tmp_path), example_inputs=(x,), optimizer=make)
    optimizer = make(model.parameters())
    held = []
    for _ in range(2):
        model(x).backward()
        held.append(pages(tmp_path))
        optimizer.step()
        held.append(pages(tmp_path))
    assert held == [0] * 4
    assert sum(value.numel() for value in model.state_dict().values()) > 4 * 512 * 512
    assert pages(tmp_path) == 0, "a state dict shares the memory"
    assert sum(float(value.sum()) for value in model.state_dict().values())
    assert pages(tmp_path) >= 4 << 20


def pages(folder: Path) -> int:
    """Bytes of files in a folder that are in this process's memory."""
    parts = Path("/proc/self/smaps").read_text().split("\n")
    inside, total = False, 0
    for line in parts:
        if "-" in line.split(" ", 1)[0]:
            inside = str(folder) in line
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


def test_a_file_that_is_cut_short(tmp_path: Path) -> None:
    model = compiled("gpt", away(tmp_path))
    (args, _) = next(batches(MODELS["gpt"], [0], ROWS))
    os.ftruncate(offload.storage_in(str(tmp_path))._file, 0)
    message = r"was cut short.*Resume from a checkpoint"
    with everything_leaves(), pytest.raises(autopar.OffloadError, match=message):
        model(*args)


def disk_that_fills(rank: int, world_size: int, folder: str) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    offload.storage_in.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        if rank:
            patch.setattr(block_storage.os, "posix_fallocate", full)
        with pytest.raises(autopar.AutoparError, match=r"No space left.*more room"):
            compiled("gpt", away(folder, zero=3))


def test_all_ranks_raise_where_one_has_a_full_disk(tmp_path: Path) -> None:
    run(disk_that_fills, 2, folder=str(tmp_path))
