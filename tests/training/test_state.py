"""State dicts have the plain model's names, and checkpoints move between worlds and stages."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

import autopar
from autopar.runtime.parameters.distribute import is_remote
from tests.harness.models import MODELS
from tests.harness.reference import Reference, batches, to_dtype, train_steps
from tests.harness.training import (
    ADAMW,
    EXACT,
    assert_same_training,
    close,
    fixed,
    plain,
    shared_captures,
    whole_state,
)
from tests.harness.worlds import run

f64 = torch.float64


def spoiled(model: nn.Module) -> nn.Module:
    """Other values than the checkpoint's, so that loading is seen."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if not is_remote(tensor):  # on another stage
                tensor.add_(1)
    return model


# -- state dicts -------------------------------------------------------------------------------


def load_plain(rank: int, world_size: int) -> None:
    """A plain state dict goes in and out, before the first call and after it."""
    for zero in (0, 2, 3, {"": 3, "blocks.1": 0}):
        plain_model = MODELS["gpt"].make()
        state = plain_model.state_dict()
        model = autopar.compile(spoiled(MODELS["gpt"].make()), strategy=fixed(zero))
        for _ in range(2):
            assert list(model.state_dict()) == list(state)
            result = model.load_state_dict(state)
            assert not result.missing_keys
            assert not result.unexpected_keys
            close(whole_state(model), state, 0)
            assert model.head.weight is model.embedding.token.weight
            model(*MODELS["gpt"].batch(6, 0)[0])
            spoiled(model)
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict({})
        with pytest.raises(RuntimeError, match="size mismatch"):
            model.load_state_dict({**state, "norm.weight": torch.zeros(5)})


@pytest.mark.slow
def test_plain_state_dicts_load() -> None:
    run(load_plain, 3)


def load_back(rank: int, world_size: int) -> None:
    """What one model has goes into another, whatever their stages."""
    models = [
        autopar.compile(MODELS["odd"].make(), strategy=fixed(zero), example_inputs=EXAMPLE)
        for zero in (3, 3, 0)
    ]
    for first, second in ((0, 1), (1, 2), (2, 0)):
        spoiled(models[first])
        models[second].load_state_dict(models[first].state_dict())
        close(whole_state(models[second]), whole_state(models[first]), 0)
    assert "shift" not in models[0].state_dict()  # not persistent


ARGS, KWARGS = MODELS["odd"].batch(6, 0)
EXAMPLE = {"features": ARGS[0], **KWARGS}


def test_state_dicts_load_between_compiled_models() -> None:
    run(load_back, 2)


# -- checkpoints -------------------------------------------------------------------------------


def save(rank: int, world_size: int, name: str, folder: str) -> None:
    model = autopar.compile(MODELS[name].make().double(), strategy=fixed(3))
    optimizer = ADAMW(model.parameters())
    with shared_captures(name, f64):
        train_steps(model, optimizer, MODELS[name], batches(MODELS[name], range(3), 12))
    parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    checkpoint.save(parts, checkpoint_id=folder)


def resume(rank: int, world_size: int, name: str, folder: str, zero: Any, early: bool) -> Reference:
    """Trains on from a checkpoint; with `early`, loads it before the plan is made."""
    model = spoiled(MODELS[name].make().double())
    example = None if early else to_dtype(MODELS[name].batch(12, 0), f64)
    inputs = example and (dict(zip(NAMES[name], example[0], strict=True)) | example[1])
    with shared_captures(name, f64):
        model = autopar.compile(model, strategy=fixed(zero), example_inputs=inputs)
    optimizer = ADAMW(model.parameters())
    parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    checkpoint.load(parts, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"]
    )
    given = batches(MODELS[name], range(3, 6), 12)
    with shared_captures(name, f64):
        losses = train_steps(model, optimizer, MODELS[name], given)
    check_layout(model, optimizer)
    return Reference(losses, whole_state(model))


NAMES = {"encoder": ("ids",), "conv": ("images", "labels")}


def check_layout(model: nn.Module, optimizer: Any) -> None:
    """Optimizer state lies where its parameter does."""
    for parameter in model.parameters():
        state = optimizer.state[parameter]["exp_avg"]
        assert isinstance(state, DTensor) == isinstance(parameter, DTensor)
        if isinstance(parameter, DTensor):
            assert state.placements == parameter.placements


@pytest.mark.slow
@pytest.mark.parametrize("name", ["encoder", "conv"])
def test_checkpoints_move_between_worlds(name: str, tmp_path: Path) -> None:
    run(save, 4, name=name, folder=str(tmp_path))
    want = plain(name, f64, 12, 6)
    mixed = {"": 0, "layers.0": 3, "layers.1": 1} if name == "encoder" else 3
    for world_size, zero, early in ((1, 0, True), (2, 0, False), (2, 1, True), (3, mixed, False)):
        answers = run(resume, world_size, name=name, folder=str(tmp_path), zero=zero, early=early)
        for losses, state in answers:
            got = Reference([*want.losses[:3], *losses], state)
            what = f"{world_size} ranks, zero {zero}, early {early}"
            assert_same_training(got, want, EXACT[f64], what)
