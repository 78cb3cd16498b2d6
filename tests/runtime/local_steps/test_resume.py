"""Runs with local steps that stop, resume or fail, on real ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar import Outer
from tests.harness.models import MODELS
from tests.harness.reference import batches
from tests.harness.training import ADAMW, close, fixed, shared_captures
from tests.harness.worlds import Raised, run

f64 = torch.float64
CASES = {
    "diloco": Outer(lr=0.7, momentum=0.9, blocks=2),
    "late": Outer(late=True, delay=2, momentum=0.5, weights="rows"),
    "ring": Outer(over="ring", lr=0.7, momentum=0.6),
}


def trained(folder: str, outer: Outer | None, stop: int, total: int = 8, **more: Any) -> Any:
    """The state after `total` steps, or nothing if the run breaks after `stop`."""
    strategy = fixed(**{"sync_every": 3, "outer": outer, "dp_shard": 1, **more})
    args, kwargs = MODELS["gpt"].batch(5, 0)
    with shared_captures("gpt", f64):
        model = autopar.compile(
            MODELS["gpt"].make().to(f64), strategy=strategy, example_inputs=args, fallback=False
        )
    optimizer = ADAMW(model.parameters())
    checkpointer = autopar.Checkpointer(folder, model, optimizer, every=4)
    given = list(batches(MODELS["gpt"], range(total), 5, f64))
    for step, (args, kwargs) in checkpointer.steps(given, total=total):
        MODELS["gpt"].loss(model(*args, **kwargs)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == stop:
            checkpointer.wait()
            return None
    return model.full_state_dict()


def resumed(rank: int, world_size: int, folder: str) -> None:
    for name, outer in CASES.items():
        want = trained(f"{folder}/{name}-a", outer, stop=0)
        assert trained(f"{folder}/{name}-b", outer, stop=5) is None
        close(trained(f"{folder}/{name}-b", outer, stop=0), want, 0)
    together = trained(f"{folder}/ring-b", None, stop=0, sync_every=None)
    if rank == 0:  # the plan without groups begins as the first one ended
        close(together, want, 0)


@pytest.mark.slow
def test_a_run_resumes_in_the_middle_of_a_round(tmp_path: Path) -> None:
    run(resumed, 2, folder=str(tmp_path))


def compiled(rank: int, world_size: int, which: str) -> None:
    odd = {"steps": 2 + rank} if which == "ranks differ" else {}
    options: dict[str, Any] = {
        "no slow axis": {"sync_every": 2},
        "uneven": {"sync_every": 2, "tp": 2, "dp_shard": 2},
        "too many": {"sync_every": 2, "dp_shard": 1, "outer": Outer(participants=3)},
        "ranks differ": {"sync_every": odd.get("steps"), "dp_shard": 1},
    }[which]
    autopar.compile(MODELS["gpt"].make(), strategy=fixed(**options))


@pytest.mark.parametrize(
    ("which", "error", "told"),
    [
        ("no slow axis", "StrategyError", "instead of all ranks of a node"),
        ("uneven", "StrategyError", "do not divide into several groups"),
        ("too many", "StrategyError", "there are 2 groups"),
        ("ranks differ", "DisagreementError", "local steps"),
    ],
)
def test_all_ranks_fail_together(which: str, error: str, told: str) -> None:
    for answer in run(compiled, 2, which=which, expect_errors=True):
        assert isinstance(answer, Raised)
        assert answer.type == error
        assert told in answer.message


def half_trained(rank: int, world_size: int) -> None:
    """A parameter without an optimizer is named, not waited for."""
    model = autopar.compile(MODELS["gpt"].make(), strategy=fixed(sync_every=2, dp_shard=1))
    optimizer = ADAMW(list(model.parameters())[1:])
    for args, kwargs in batches(MODELS["gpt"], range(3), 4, torch.float32):
        MODELS["gpt"].loss(model(*args, **kwargs)).backward()
        optimizer.step()


def test_parameters_without_an_optimizer_are_named() -> None:
    for answer in run(half_trained, 2, expect_errors=True):
        assert isinstance(answer, Raised)
        assert "no optimizer steps embedding.token.weight" in answer.message


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"sync_every": 0}, "sync_every=0"),
        ({"sync_every": 2, "outer": "mean"}, "choose local_sgd"),
        ({"outer": "diloco"}, "give sync_every"),
        ({"sync_every": 2, "outer": Outer(blocks=3)}, "at most as many blocks"),
        ({"sync_every": 2, "outer": Outer(late=True, delay=3)}, "one average at a time"),
    ],
)
def test_contradictions_are_told(options: dict[str, Any], told: str) -> None:
    with pytest.raises(autopar.StrategyError, match=told):
        autopar.Strategy(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"over": "mean"},
        {"over": "ring", "late": True},
        {"momentum": 1.0},
        {"late": 1},
        {"delay": 2},
    ],
)
def test_averagings_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(autopar.StrategyError, match=next(iter(options))):
        Outer(**options)
