"""States on storage: numbers of the inner optimizer under any plan, and errors on all ranks."""

import contextlib
import errno
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import autopar
from autopar._torch import local_tensor
from autopar.core.common import block_storage
from autopar.cost_model.memory.optimizer_memory import OptimizerMemory
from benchmarks.memoize import memoized_capture
from tests.harness.training import close, fixed
from tests.harness.worlds import run

f64 = torch.float64
SHAPES = [(4, 12), (4, 5)]
CAPTURES: dict[Any, Any] = {}


class Regressor(nn.Module):
    """Two layers and a norm, which pipelines can cut and tp can divide."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(12, 16), nn.LayerNorm(16), nn.Linear(16, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.down(self.norm(self.up(x).tanh())) - y).square().mean()


def make_regressor(dtype: torch.dtype = f64) -> Regressor:
    torch.manual_seed(3)
    return Regressor().to(dtype)


def batch(seed: int, dtype: torch.dtype = f64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES]


def train(model: nn.Module, optimizer: Any, steps: Any, clip: Any = None) -> None:
    """Steps of two accumulated batches under a falling learning rate."""
    scheduler = optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    dtype = next(model.parameters()).dtype
    for seed in steps:
        for part in (0, 100):
            model(*batch(seed + part, dtype)).backward()
        if clip is not None:
            clip(0.5)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


KINDS: dict[str, Any] = {
    "AdamW": partial(optim.AdamW, amsgrad=True),
    "AdamW, foreach": partial(optim.AdamW, foreach=True),
    "AdamW, fused": partial(optim.AdamW, fused=True),
    "SGD": partial(optim.SGD, lr=0.05, momentum=0.9),
    "Adagrad": optim.Adagrad,  # makes states before its first step
    "Adafactor": optim.Adafactor,  # keeps rows and columns
    "NAdam": optim.NAdam,
}


def offloaded(kind: Any, parameters: Any, folder: Any = "/tmp", **options: Any) -> Any:
    """The optimizer with its states on storage, in several blocks."""
    kind, more = (kind.func, kind.keywords) if isinstance(kind, partial) else (kind, {})
    given = {"folder": folder, "block_bytes": 600, "checked": True, **more, **options}
    return autopar.OffloadedOptimizer(kind, parameters, **given)


@pytest.mark.parametrize("name", KINDS)
def test_numbers_and_states_of_the_inner_optimizer(name: str, tmp_path: Path) -> None:
    plain, model = make_regressor(), make_regressor()
    make = partial(offloaded, KINDS[name], folder=tmp_path)
    states = []
    for trained, made in ((plain, KINDS[name]), (model, make)):
        first, resumed = made(trained.parameters()), made(trained.parameters())
        train(trained, first, range(2))
        resumed.load_state_dict(first.state_dict())
        train(trained, resumed, range(2, 4))
        states.append(resumed.state_dict())

    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(*states, rtol=0, atol=0)
    assert not list(tmp_path.iterdir()), "the file has no name"


def test_states_leave_memory_and_buffers_stay(tmp_path: Path) -> None:
    model = make_regressor()
    optimizer = offloaded(optim.AdamW, model.parameters(), tmp_path)
    train(model, optimizer, range(1))
    assert optimizer.stored_bytes >= 2 * sum(p.nbytes for p in model.parameters())
    kept = [t for _, b in optimizer._blocks for s in b.inner.state.values() for t in s.values()]
    assert sum(t.nbytes for t in kept) <= 4 * len(kept)
    train(model, optimizer, range(1, 2))  # the first that reads
    before = {id(buffer) for buffer in optimizer._transfers._free}
    train(model, optimizer, range(2, 4))
    assert len(before) <= 3
    assert {id(buffer) for buffer in optimizer._transfers._free} == before


def test_masters_are_a_float32_model(tmp_path: Path) -> None:
    """A bf16 model is its float32 master, rounded; a value that the user sets becomes a master."""
    model = make_regressor(torch.bfloat16)
    make = partial(offloaded, optim.SGD, folder=tmp_path, master_dtype=torch.float32)
    optimizer = make(model.parameters())
    masters = [p.detach().float() for p in model.parameters()]
    for seed in range(4):
        model(*batch(seed, torch.bfloat16)).backward()
        gradients = [p.grad.float() for p in model.parameters() if p.grad is not None]
        masters = [m.add(g, alpha=-1e-3) for m, g in zip(masters, gradients, strict=True)]
        optimizer.step()
        optimizer.zero_grad()
        if seed == 1:
            with torch.no_grad():
                model.up.bias.fill_(0.3)
            masters[1] = model.up.bias.detach().float()
        if seed == 2:
            saved, optimizer = optimizer.state_dict(), make(model.parameters())
            optimizer.load_state_dict(saved)
            assert all(state["master"].numel() for state in saved["state"].values())
    for master, parameter, state in zip(
        masters, model.parameters(), optimizer.state_dict()["state"].values(), strict=True
    ):
        assert torch.equal(master, state["master"])
        assert torch.equal(master.bfloat16(), parameter)


STRATEGIES = {
    "zero3": fixed(3),
    "tp x zero1": fixed(1, tp=2),
    "pp": fixed(0, pp=2, micro_batches=2),
}


def compiled(strategy: Any) -> Any:
    with memoized_capture(CAPTURES):
        return autopar.compile(make_regressor(), strategy=strategy, example_inputs=tuple(batch(0)))


def train_and_move(rank: int, world_size: int, name: str, folder: str) -> None:
    plain = make_regressor()
    adamw = optim.AdamW(plain.parameters(), lr=1e-2)
    train(plain, adamw, range(3), partial(nn.utils.clip_grad_norm_, list(plain.parameters())))

    model = compiled(STRATEGIES[name])
    optimizer = offloaded(optim.AdamW, model.parameters(), folder, lr=1e-2)
    train(model, optimizer, range(2), model.clip_grad_norm_)
    saved = model.full_state_dict(), model.full_optimizer_state_dict(optimizer)

    model = compiled(STRATEGIES["zero3"])
    for make in (offloaded, lambda kind, given, folder, **options: kind(given, **options)):
        model.load_full_state_dict(saved[0])
        moved = make(optim.AdamW, model.parameters(), folder, lr=1e-2)
        model.load_full_optimizer_state_dict(moved, saved[1])
        train(model, moved, [2], model.clip_grad_norm_)
        close(model.full_state_dict(), plain.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_any_plan_and_back_to_memory(name: str, tmp_path: Path) -> None:
    run(train_and_move, 2, name=name, folder=str(tmp_path))


def load_masters(rank: int, world_size: int, folder: str) -> None:
    model = compiled(STRATEGIES["zero3"])
    optimizers = [
        offloaded(optim.AdamW, model.parameters(), folder, master_dtype=f64) for _ in range(2)
    ]
    train(model, optimizers[0], range(1))
    saved = optimizers[0].state_dict()
    for state in saved["state"].values():
        state["master"] = state["master"] * 2.0
    optimizers[1].load_state_dict(saved)
    masters = [local_tensor(s) for o in optimizers for _, b in o._blocks for s in b.shadows]
    assert not any(master.numel() for master in masters), "masters stay in memory"
    for key, state in optimizers[1].state_dict()["state"].items():
        assert torch.equal(
            local_tensor(state["master"]), local_tensor(saved["state"][key]["master"])
        )


def test_masters_of_shards(tmp_path: Path) -> None:
    run(load_masters, 2, folder=str(tmp_path))


def fail_on_one(rank: int, world_size: int, folder: str) -> None:
    model = compiled(STRATEGIES["zero3"])
    optimizer = offloaded(optim.AdamW, model.parameters(), f"{folder}/{rank}")
    model(*batch(0)).backward()
    with pytest.raises(autopar.DisagreementError, match=r"rank 1 failed.*a folder that exists"):
        optimizer.step()


def test_all_ranks_raise_where_one_has_no_folder(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    run(fail_on_one, 2, folder=str(tmp_path))


def test_parameters_without_states(tmp_path: Path) -> None:
    """SGD without momentum has none, and those of a single number stay in memory."""
    for kind, values in ((optim.SGD, torch.ones(4)), (optim.AdamW, torch.tensor(1.0))):
        plain, own = nn.Parameter(values.clone()), nn.Parameter(values.clone())
        for parameter in (plain, own):
            parameter.grad = torch.ones_like(parameter)
        optimizers = kind([plain], lr=0.1), offloaded(kind, [own], tmp_path, lr=0.1)
        for optimizer in (*optimizers, *optimizers):
            optimizer.step()
        assert torch.equal(plain, own)
        assert optimizers[1].state_dict()["state"] == optimizers[0].state_dict()["state"]


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(block_storage.os, "posix_fallocate", full)
    model = make_regressor()
    optimizer = offloaded(optim.AdamW, model.parameters(), tmp_path)
    model(*batch(0)).backward()
    with pytest.raises(autopar.OffloadError, match=r"No space left.*bytes are free.*more room"):
        optimizer.step()


def test_changed_bytes_are_noticed(tmp_path: Path) -> None:
    model = make_regressor()
    optimizer = offloaded(optim.AdamW, model.parameters(), tmp_path)
    train(model, optimizer, range(1))
    with buffered(optimizer._transfers._storage._file) as file:
        os.pwrite(file, b"\x01" * 8, 64)
    with pytest.raises(autopar.OffloadError, match="differ from what was written"):
        train(model, optimizer, range(1))


def test_a_file_that_is_cut_short(tmp_path: Path) -> None:
    model = make_regressor()
    optimizer = offloaded(optim.AdamW, model.parameters(), tmp_path)
    train(model, optimizer, range(1))
    os.ftruncate(optimizer._transfers._storage._file, 0)
    with pytest.raises(autopar.OffloadError, match=r"was cut short.*Resume from a checkpoint"):
        train(model, optimizer, range(1))


@contextlib.contextmanager
def buffered(file: int) -> Iterator[int]:
    """The same file for writes of any size."""
    other = os.open(f"/proc/self/fd/{file}", os.O_RDWR)
    yield other
    os.close(other)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (optim.LBFGS, "without a closure"),
        ("AdamW", "give a class of optimizers"),
    ],
)
def test_optimizers_that_need_all_parameters(kind: Any, reason: str) -> None:
    with pytest.raises(autopar.StrategyError, match=reason):
        autopar.OffloadedOptimizer(kind, make_regressor().parameters(), folder="/tmp")


class ClipsByAll(optim.SGD):
    """Scales by the norm of all gradients inside of its step."""

    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(parameters, 1.0)
        return super().step(closure)


def test_coupled_parameters_are_found_by_stepping() -> None:
    with pytest.raises(autopar.StrategyError, match="ClipsByAll steps all parameters together"):
        autopar.OffloadedOptimizer(ClipsByAll, make_regressor().parameters(), folder="/tmp")


def test_planner_counts_buffers_instead_of_states(tmp_path: Path) -> None:
    make = partial(autopar.OffloadedOptimizer, optim.AdamW, folder=tmp_path, block_bytes="1MiB")
    memory = OptimizerMemory.measure(make)
    assert memory.state == ()
    assert memory.stored == pytest.approx(2.0, rel=0.01)
    sizes = [1 << 20] * 10
    assert memory.buffers(sizes) == pytest.approx(4 * 2 * (1 << 20), rel=0.01)
    assert memory.buffers([1 << 10]) == pytest.approx(2 << 10, rel=0.01)
