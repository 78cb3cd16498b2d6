"""GradScaler: an overflow that one rank alone sees makes all skip the step, as one device does."""

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from autopar.runtime.parameters.distribute import is_remote
from tests.harness.models import MODELS
from tests.harness.reference import to_dtype
from tests.harness.training import Pair, fixed, whole_state
from tests.harness.worlds import run

ROWS = 8
SPOILED = 1
"""The step in which one gradient overflows."""

SETUPS: list[dict[str, Any]] = [
    {"zero": 0},
    {"zero": 3},
    {"zero": {"": 0, "blocks.0": 0, "blocks.1": 3}},  # the first gradient is whole, others are not
    {"tp": 2},
    {"cp": 2},
    {"pp": 2, "micro_batches": 2, "schedule": "1f1b"},
    {"pp": 2, "micro_batches": 2, "schedule": "interleaved"},
]


def spoil(model: Any, rank: int, name: str) -> None:
    """Puts an infinity into one gradient, on the last of the ranks that have a part of it."""
    parameter = dict(model.named_parameters())[name]
    if is_remote(parameter) or parameter.grad is None:  # on another stage
        return
    gradient = parameter.grad
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    sharded = isinstance(gradient, DTensor) and any(p.is_shard() for p in gradient.placements)
    if rank == 1 or not sharded:
        local.view(-1)[-1] = torch.inf


def scaled_steps(rank: int, world_size: int, setup: dict[str, Any]) -> None:
    options = dict(setup)
    pair = Pair("gpt", strategy=fixed(options.pop("zero", 0), **options))
    names = [name for name, _ in pair.plain.named_parameters()]
    for name in (names[0], names[-1]):  # of the first stage, and of the last
        scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in pair.models]
        for step in range(3):
            args, kwargs = to_dtype(MODELS["gpt"].batch(ROWS, step), torch.float64)
            for model, optimizer, scaler in zip(pair.models, pair.optimizers, scalers, strict=True):
                scaler.scale(model(*args, **kwargs)).backward()
                if step == SPOILED:
                    spoil(model, rank, name)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            assert scalers[1].get_scale() == scalers[0].get_scale()
            assert scalers[0].get_scale() == 1024.0 / (1 + (step >= SPOILED))
        pair.check_state()


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_ranks_skip_the_same_steps_as_one_device(setup: dict[str, Any]) -> None:
    run(scaled_steps, 2, setup=setup)


def half_steps(rank: int, world_size: int, setup: dict[str, Any]) -> None:
    """The first scale is far too large, and the second fits; a pipeline begins with the second."""
    options = dict(setup)
    strategy = fixed(options.pop("zero", 0), **options)
    pair = Pair("gpt", strategy=strategy, dtype=torch.float32, precision="fp16")
    first = 2.0**8 if "pp" in setup else 2.0**40
    scalers = [torch.amp.GradScaler("cpu", first, backoff_factor=2.0**-32) for _ in pair.models]
    before = whole_state(pair.parallel)
    for step in range(4):
        args, kwargs = to_dtype(MODELS["gpt"].batch(ROWS, step), torch.float32)
        for model, optimizer, scaler in zip(pair.models, pair.optimizers, scalers, strict=True):
            with torch.autocast("cpu", torch.float16, enabled=model is pair.plain):
                loss = model(*args, **kwargs)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        scales = [scaler.get_scale() for scaler in scalers]
        assert scales == [2.0**8, 2.0**8], step
    after = whole_state(pair.parallel)
    assert any(not torch.equal(after[name], before[name]) for name in after), "no step was taken"
    pair.check_state(tolerance=1e-3)


@pytest.mark.parametrize("setup", [SETUPS[1], SETUPS[3], SETUPS[5]], ids=str)
def test_fp16_trains_as_on_one_device(setup: dict[str, Any]) -> None:
    run(half_steps, 2, setup=setup)
