"""Bad input to pipelines: right, or a clear error on every rank; no rank waits for ever."""

import datetime
import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

import autopar
from tests.harness.models import MODELS
from tests.harness.training import Pair, close
from tests.harness.worlds import run, run_isolated
from tests.test_errors import Model, all_raise, the_others_stop
from tests.training.test_pipeline import batch_of, staged


def call(rank: int, world_size: int, rows: int, seeds: list[int], **options: Any) -> None:
    model = autopar.compile(MODELS["gpt"].make(), strategy=staged(2, **options))
    model(*MODELS["gpt"].batch(rows, seeds[rank])[0]).backward()


def test_fewer_rows_than_micro_batches() -> None:
    answers = run(call, 2, rows=3, seeds=[0, 0], expect_errors=True)
    all_raise(answers, autopar.BatchError, "3 rows", "4 micro-batches")


def test_ranks_with_other_batches() -> None:
    answers = run(call, 2, rows=8, seeds=[0, 1], expect_errors=True)
    all_raise(answers, autopar.DisagreementError, "different batches")


def cut(rank: int, world_size: int) -> None:
    model = autopar.compile(Model(), strategy=staged(world_size))
    model(torch.ones(8, 4)).backward()


def test_fewer_layers_than_stages() -> None:
    answers = run(cut, 4, expect_errors=True)
    all_raise(answers, autopar.StrategyError, "4 stages")


class Inner(nn.Module):
    """Returns what an inner stage has, and changes in place what the next one reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.calls += 1
        hidden = self.layers[0](x)
        second = self.layers[1](hidden.tanh())
        hidden += second.detach() * 0.5
        third = self.layers[2](second + hidden)
        third.mul_(hidden)
        last = self.layers[3](third)
        return hidden, second, last.square().mean()


def use_inner(rank: int, world_size: int) -> None:
    for options in ({}, {"schedule": "interleaved"}):
        pair = Pair(Inner, strategy=staged(2, 1, **options))
        for step in range(3):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).double()
            outputs = [model(x) for model in pair.models]
            for want, have in zip(*outputs, strict=True):
                close(have, want)
            for hidden, second, loss in outputs:
                (loss + (0.1 * hidden.mean() + second.sum() if step else 0.0)).backward()
            pair.step()
        pair.check_state()


def test_inner_outputs_and_changes_in_place() -> None:
    run(use_inner, 2)


def die(rank: int, world_size: int) -> None:
    """Rank 1 is killed some time in the middle of its steps."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
    model = autopar.compile(MODELS["gpt"].make(), strategy=staged(3))
    for step in range(1000):
        if (rank, step) == (1, 3):
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGKILL)).start()
        model(*MODELS["gpt"].batch(8, 0)[0]).backward()


@pytest.mark.slow
def test_the_others_stop_when_one_dies_in_the_middle() -> None:
    the_others_stop(die)


def mistake(rank: int, world_size: int) -> None:
    """What one stage alone meets: an index that its embedding does not have."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
    model = autopar.compile(MODELS["gpt"].make(), strategy=staged(2))
    ids, targets = MODELS["gpt"].batch(8, 0)[0]
    model(ids, targets).backward()
    ids[5, 0] = 1000
    model(ids, targets).backward()


@pytest.mark.slow
def test_an_error_of_one_stage_stops_all() -> None:
    begin = time.monotonic()
    first, second = run_isolated(mistake, 2, init=False, expect_errors=True)
    assert first[0] == "IndexError"
    all_raise([second], autopar.CommunicationError, "first error among all ranks")
    assert time.monotonic() - begin < 60


@pytest.mark.slow
@pytest.mark.parametrize("name", ["conv"])
def test_batch_norm_over_micro_batches(name: str) -> None:
    """It needs the whole batch at once, so that micro-batches are one."""
    for notes in run(norms, 2, name=name):
        assert any("one micro-batch instead of 2" in note for note in notes)


def norms(rank: int, world_size: int, name: str) -> tuple[str, ...]:
    model = autopar.compile(MODELS[name].make().double(), strategy=staged(2, 2))
    model(*batch_of(name, 0)[0]).backward()
    return model.plan.notes
