"""Ranks that do different things: an error on every rank, at once where they can still talk."""

import datetime
import json
import re
import tempfile
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.errors import DisagreementError
from autopar.runtime.agreement.channel import channel, finish_exchange
from autopar.runtime.agreement.replicas import Replicas, check_samples
from tests.harness.disagreements.scenarios import Scenario
from tests.harness.training import fixed
from tests.harness.worlds import Raised, run

TIMEOUT = datetime.timedelta(seconds=30)


def play(rank: int, world_size: int, scenario: Scenario) -> str:
    dist.init_process_group("gloo", timeout=TIMEOUT)
    with tempfile.TemporaryDirectory() as folder:
        return json.dumps(scenario.loop(rank, world_size, folder).run())


def told(name: str, strategy: str, ranks: int = 2) -> list[Raised]:
    """The errors of a scenario, which every rank raises."""
    scenario = Scenario(name, strategy)
    answers = run(play, ranks, scenario=scenario, init=False, expect_errors=True)
    assert all(isinstance(answer, Raised) for answer in answers), answers
    return answers


@pytest.mark.parametrize(
    ("name", "strategy", "message"),
    [
        ("AnotherForward", "ddp", r"\[1\] run another forward.*abs.*before_training.py"),
        ("AnotherLoss", "zero3", r"\[1\] run another forward or loss_fn"),
        ("AnotherConstant", "zero2", r"First difference: constant"),
        ("RaisesInForward", "pp", r"rank 1 failed where others did not.*a bug of this rank"),
        ("OtherVersion", "ddp", r"another version of autopar than rank 0: 0.0.9 on rank 1"),
        ("EvaluatesAlone", "zero3", r"evaluation, with gradients on rank 1"),
        ("AnotherInputDtype", "tp", r"argument 0 is bfloat16.* on rank 1, argument 0 is float"),
        ("SkipsBackward", "pp, 2 micro-batches", r"\[0\]: runs backward.*\[1\]: calls Model"),
        ("RunsBackwardTwice", "zero3", r"\[0\]: calls Model; rank\(s\) \[1\]: runs backward"),
        ("BackwardOutOfOrder", "ddp", r"backward through call 1.*backward through call 2"),
        ("ScalesTheLoss", "ddp", r"another gradient than rank 0: 2.0 on rank 1"),
        ("NoSyncAlone", "ddp", r"another no_sync\(\).*inside of it on rank 1"),
        ("FreezesLate", "zero3", r"all but layers.0.weight on rank 1"),
        ("GradientHookAlone", "zero3", r"other gradient hooks than rank 0: 1 on rank 1"),
        ("AnotherRate", "zero3", r"another optimizer.*lr=0.2"),
        ("AnotherRate", "pp", r"another optimizer.*lr=0.2"),
        ("SkipsTheUpdate", "zero3", r"no step on rank 1, SGD with lr=0.1.* on rank 0"),
        ("ForgetsToZero", "tp", r"hold gradients of other parameters"),
        ("ChangesAParameter", "ddp", r"rank 1 holds other values of.*layers.*parted"),
        ("ChangesABuffer", "pp", r"rank 1 holds other values of 'mean'"),
        ("ClipsOtherwise", "zero2", r"another norm than rank 0: max_norm=0.1"),
        ("SavesAlone", "pp", r"\[1\]: takes the state dict"),
        ("RateSeenByCheck", "ddp", r"the optimizer's groups: lr=0.3.* on rank 1"),
        ("FallbackSkipsBackward", "ddp", r"\[0\]: runs backward.*\[1\]: calls Model"),
    ],
)
def test_both_ranks_are_told(name: str, strategy: str, message: str) -> None:
    for answer in told(name, strategy):
        assert answer.type == "DisagreementError"
        assert re.search(message, answer.message, re.DOTALL), answer.message


@pytest.mark.slow
def test_three_ranks_name_the_one() -> None:
    for answer in told("NoSyncAlone", "zero3", 3):
        assert "rank(s) [2]" in answer.message


def test_a_rank_that_raises_keeps_its_own_error() -> None:
    first, second = told("WithoutRows", "ddp")
    assert second.type == "BatchError"
    assert first.type == "DisagreementError"
    assert "raises BatchError: rows= says that dim 0 of argument" in first.message


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("LocalRows", "ddp"),
        ("AnotherSeed", "ddp"),
        ("ChecksEverything", "zero3"),
        ("ChecksEverything", "tp"),
        ("ChecksEverything", "pp"),
    ],
)
def test_what_may_differ_trains(name: str, strategy: str) -> None:
    first, second = run(play, 2, scenario=Scenario(name, strategy), init=False)
    assert first == second
    assert len(json.loads(first)) > 1


@pytest.mark.parametrize(("factor", "parts"), [(1 + 1e-6, False), (1 + 1e-3, True)])
def test_copies_may_differ_by_rounding(factor: float, parts: bool) -> None:
    first, second = (
        Replicas({"w": torch.ones(9) * f}, {}).samples(0).read() for f in (1.0, factor)
    )
    shown = [[number for sample in own for number in sample.numbers] for own in (first, second)]
    with pytest.raises(DisagreementError, match=r"rank 1 .*'w'") if parts else nullcontext():
        check_samples(shown, first)


def announce(rank: int, world_size: int) -> list[str]:
    """Each record is settled before the next leaves, and by a program before it communicates."""
    opened, heard = channel(), list[str]()
    assert opened is not None
    opened.start_exchange(
        "begins", samples=[rank], then=lambda met: heard.append(f"{met.samples[1][0]}")
    )
    opened.start_exchange("goes on", then=lambda met: heard.append("on"))
    assert heard == ["1"]
    finish_exchange()
    finish_exchange()
    opened.start_exchange(f"does {rank}")
    with pytest.raises(DisagreementError, match=r": does 0; rank.*: does 1"):
        opened.exchange("ends")
    return heard


def test_records_travel_while_ranks_compute() -> None:
    assert run(announce, 2) == [["1", "on"]] * 2


def evaluate_alone(rank: int, world_size: int) -> None:
    """The last rank evaluates while the other trains; both compute first."""
    torch.manual_seed(0)
    model = autopar.compile(nn.Linear(4, 4), strategy=fixed(0))
    x = torch.ones(4, 4)
    model(x).sum().backward()
    with pytest.raises(DisagreementError, match="call in another mode"):
        model.train(rank == 0)(x)


def test_a_call_is_agreed_upon_before_its_first_collective() -> None:
    run(evaluate_alone, 2)
