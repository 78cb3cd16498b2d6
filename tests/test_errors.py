"""Bad input: a clear error on every rank, and no rank that waits for ever."""

import datetime
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

import autopar
from autopar.capture.batch_slices import capture_of_rank
from autopar.cost_model.cost import ClusterError
from autopar.cost_model.measurement.operator_times import OperatorTimes
from autopar.cost_model.measurement.step_replay import ReplayGroup
from autopar.passes.registration import DISABLE
from autopar.planner.search import build_evaluator as decide
from tests.harness.models import MODELS
from tests.harness.nonsense.examples import example_plan
from tests.harness.training import fixed
from tests.harness.worlds import Raised, run, run_isolated


class Model(nn.Module):
    """One layer and a loss."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean()


def all_raise(answers: list[Any], kind: type[Exception], *parts: str) -> None:
    """Every rank raised an error of this kind that says all of `parts`."""
    for answer in answers:
        assert isinstance(answer, Raised), answer
        assert answer[0] == kind.__name__, answer
        for part in parts:
            assert part in answer[1], answer[1]


def call(rank: int, world_size: int, rows: list[int], seeds: list[int], **options: Any) -> None:
    """One step on a batch of `rows[rank]` rows, drawn with `seeds[rank]`."""
    model = autopar.compile(Model(), strategy=fixed(0), **options)
    x = torch.randn(rows[rank], 4, generator=torch.Generator().manual_seed(seeds[rank]))
    model(x).backward()


@pytest.mark.slow
def test_too_few_rows() -> None:
    answers = run(call, 3, rows=[2, 2, 2], seeds=[0, 0, 0], expect_errors=True)
    all_raise(answers, autopar.BatchError, "2 rows", "3 ranks", "example_inputs")


def test_different_batches_where_they_must_agree() -> None:
    answers = run(call, 3, rows=[6, 6, 6], seeds=[0, 0, 1], expect_errors=True)
    all_raise(answers, autopar.DisagreementError, "different batches", "batch='local'")


def test_different_numbers_of_rows() -> None:
    answers = run(call, 2, rows=[4, 5], seeds=[0, 1], batch="local", expect_errors=True)
    all_raise(answers, autopar.BatchError, "different numbers of rows", "5 on rank 1, 4 on rank 0")


def world(rank: int, world_size: int, asked: int) -> None:
    autopar.compile(Model(), asked)


def test_a_world_size_that_contradicts_torchrun() -> None:
    for init in (True, False):
        answers = run(world, 2, asked=4, init=init, expect_errors=True)
        all_raise(answers, autopar.StrategyError, "world_size=4, but 2 ranks", "--nproc 4")


def test_several_ranks_without_a_launcher() -> None:
    with pytest.raises(autopar.StrategyError, match=r"outside of torchrun.*autopar run"):
        autopar.compile(Model(), 4)


def differ(rank: int, world_size: int) -> None:
    autopar.compile(Model(4 + rank))


def test_different_models() -> None:
    answers = run(differ, 2, expect_errors=True)
    first = "parameter", "where rank 0 has parameter"
    all_raise(answers, autopar.DisagreementError, "rank 1 another", *first, "same model")


def differ_in_options(rank: int, world_size: int) -> None:
    """Every rank is told, and all can go on."""
    for options, what in (
        ({"strategy": ["ddp", "zero3"][rank]}, "strategy"),
        ({"batch": ["global", "local"][rank]}, "batch mode"),
        ({"precision": [None, "bf16"][rank]}, "precision"),
        ({"backend": ["eager", "inductor"][rank]}, "backend"),
        ({"example_inputs": [None, (torch.ones(4, 4),)][rank]}, "example_inputs"),
    ):
        with pytest.raises(autopar.DisagreementError, match=rf"\[1\] hold another .*{what}"):
            autopar.compile(Model(), **options)
    with (
        patch.dict(os.environ, {DISABLE: ["", "schedule_overlap"][rank]}),
        pytest.raises(autopar.DisagreementError, match="another set of passes"),
    ):
        autopar.compile(Model())
    model = Model()
    model.register_buffer("sizes", torch.zeros(3 + rank))
    with pytest.raises(autopar.DisagreementError, match="buffer sizes"):
        autopar.compile(model)


def test_different_options() -> None:
    run(differ_in_options, 2)


def train_without_overlap(rank: int, world_size: int) -> str:
    """The passes of a step, as they are logged."""
    logger, messages = logging.getLogger("autopar.runtime.codegen.program"), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    with patch.dict(os.environ, {DISABLE: "schedule_overlap"}):
        autopar.compile(Model(), strategy="zero3")(torch.ones(4, 4)).backward()
    logger.removeHandler(handler)
    (message,) = messages
    return message


@pytest.mark.slow
def test_training_without_a_pass() -> None:
    for rank, passes in enumerate(run(train_without_overlap, 2)):
        assert passes.startswith(f"passes of rank {rank} under plan zero3")
        assert "shard_parameters(" in passes
        assert "schedule_overlap(" not in passes


def plan_differently(rank: int, world_size: int) -> None:
    x = torch.randn(4, 4)
    plan = autopar.plan(Model(), 2, example_inputs=(x,), strategy=fixed(3 * rank))
    autopar.compile(Model(), plan=plan)


def test_different_plans() -> None:
    answers = run(plan_differently, 2, expect_errors=True)
    all_raise(answers, autopar.DisagreementError, "[1] hold another plan")


def follow_own_plan(rank: int, world_size: int) -> None:
    """One rank's plan is for another model: it says so, and the others do not wait for it."""
    x = torch.randn(4, 4)
    plan = autopar.plan(Model(4 + rank), 2, example_inputs=(x,), strategy=fixed(3))
    autopar.compile(Model(), plan=plan)


def test_a_plan_for_another_model_on_one_rank() -> None:
    answers = run(follow_own_plan, 2, expect_errors=True)
    all_raise(answers, autopar.DisagreementError, "rank 1 failed", "another model")


def test_a_plan_for_another_model_or_world() -> None:
    x = torch.randn(4, 4)
    other = autopar.plan(Model(8), 1, example_inputs=(x,), strategy=fixed(0))
    with pytest.raises(autopar.PlanError, match=r"another model.*layer\.bias, layer\.weight"):
        autopar.compile(Model(), plan=other)
    larger = autopar.plan(Model(), 2, example_inputs=(x,), strategy=fixed(0))
    with pytest.raises(autopar.PlanError, match="for 2 ranks, but 1"):
        autopar.compile(Model(), plan=larger)


def test_a_plan_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    autopar.plan(Model(), 1, example_inputs=(torch.randn(2, 4),), strategy=fixed(0)).save(path)
    path.write_text(path.read_text()[:100])
    with pytest.raises(autopar.PlanError, match="is not a plan"):
        autopar.Plan.load(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "zero4"}, "zero4.*auto, fastest, ddp, zero1"),
        ({"batch": "mine"}, "choose global, local"),
        ({"precision": "int8"}, "choose bf16, fp16, fp32"),
        ({"memory": "lots"}, "24GiB"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(autopar.StrategyError, match=message):
        autopar.compile(Model(), **options)


@pytest.mark.parametrize("options", [{"zero": 4}, {"recompute": "some"}, {"batch_semantics": 1}])
def test_bad_strategies(options: dict[str, Any]) -> None:
    with pytest.raises(autopar.StrategyError):
        autopar.Strategy(**options)


def test_blocks_that_are_not_there() -> None:
    with pytest.raises(autopar.StrategyError, match=r"\['layers.0'\]. It has \['', 'blocks.0', "):
        autopar.compile(MODELS["gpt"].make(), strategy=autopar.Strategy(zero={"layers.0": 3}))


def test_a_model_that_is_compiled_already() -> None:
    with pytest.raises(autopar.StrategyError, match="backend='inductor'"):
        autopar.compile(torch.compile(Model()))


def compile_twice(rank: int, world_size: int) -> None:
    model = Model()
    made = autopar.compile(model, strategy=fixed(3))
    for again in (model, made, nn.parallel.DistributedDataParallel(Model())):
        with pytest.raises(autopar.StrategyError, match=r"distributed already|compiled by autopar"):
            autopar.compile(again, strategy=fixed(3))


def test_a_model_that_is_distributed_already() -> None:
    run(compile_twice, 2)


def squeeze(rank: int, world_size: int) -> None:
    case = MODELS["gpt"]
    inputs = case.batch(4, 0)[0]
    autopar.compile(case.make(), memory="1KiB", example_inputs=inputs, strategy=fixed(3))


@pytest.mark.slow
def test_a_cap_that_nothing_fits_is_said_on_every_rank() -> None:
    answers = run(squeeze, 2, expect_errors=True)
    all_raise(
        answers, autopar.OutOfMemoryError, "nothing fits under 1.0 KiB", "bytes", "would help"
    )


def die(rank: int, world_size: int) -> None:
    """Rank 1 is killed before its third step."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
    model = autopar.compile(Model(), strategy=fixed(3))
    for step in range(5):
        if (rank, step) == (1, 2):
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.ones(6, 4)).backward()


def the_others_stop(fn: Callable[..., None]) -> None:
    """Of three ranks the second is killed: the others say so, and do not wait for ever."""
    begin = time.monotonic()
    answers = run_isolated(fn, 3, init=False, expect_errors=True)
    assert answers[1] == ("Died", "exit code -9")
    all_raise([answers[0], answers[2]], autopar.CommunicationError, "another rank died", "rank ")
    assert time.monotonic() - begin < 60  # not a matter of speed: nothing waits for ever


@pytest.mark.slow
def test_the_others_stop_when_one_dies() -> None:
    the_others_stop(die)


def object_alone(rank: int, world_size: int) -> None:
    model = autopar.compile(Model(), strategy=fixed(3))
    for step in range(5):
        if (rank, step) == (1, 2):
            raise ValueError("the user's own mistake")
        model(torch.ones(6, 4)).backward()


def test_the_others_stop_when_one_raises() -> None:
    answers = run(object_alone, 3, expect_errors=True)
    assert answers[1] == ("ValueError", "the user's own mistake")
    all_raise([answers[0], answers[2]], autopar.CommunicationError, "first error among all ranks")


def make_optimizer_too_early(rank: int, world_size: int) -> None:
    plain = Model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    model = autopar.compile(plain, strategy=fixed(3))
    model(torch.ones(6, 4)).backward()
    optimizer.step()


def test_an_optimizer_made_before_compile_is_refused() -> None:
    answers = run(make_optimizer_too_early, 2, expect_errors=True)
    all_raise(answers, autopar.StrategyError, "before autopar.compile", "Make it afterwards")


class Branching(nn.Module):
    """Python that depends on values of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        if h.sum() > 0:
            return h.sum()
        return h.mean()


def test_what_cannot_be_captured_names_the_line() -> None:
    model = autopar.compile(Branching(), fallback=False)
    with pytest.raises(autopar.CaptureError, match=r"test_errors.py:\d+: if h.sum\(\) > 0"):
        model(torch.ones(3, 2))


class Lookup(nn.Module):
    """An embedding of four rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x).sum()


def test_an_error_in_the_graph_names_the_users_line() -> None:
    model = autopar.compile(Lookup(), strategy=fixed(0))
    model(torch.tensor([1, 2])).backward()
    with pytest.raises(IndexError) as error:
        model(torch.tensor([1, 9]))
    (note,) = error.value.__notes__
    assert "aten.embedding" in note
    assert "return self.table(x).sum()" in note


def divide(rank: int, world_size: int) -> autopar.Plan | None:
    """A model that is partitioned where only rank 0 may look for how."""
    case = MODELS["gpt"]
    solve = decide.partition_by_bytes if rank == 0 else None
    with patch.object(decide, "partition_by_bytes", solve):
        model = autopar.compile(
            case.make(),
            world_size,
            example_inputs=case.batch(4, 0)[0],
            strategy=autopar.Strategy(tp=2, zero=0, recompute="none"),
            memory="1GiB",
            fallback=False,
        )
    return model.plan


@pytest.mark.slow
def test_one_rank_finds_the_partition_that_all_measure() -> None:
    first, second = run(divide, 2)
    assert first == second
    assert first.partitions


def rehearse_unlike(rank: int, world_size: int) -> str:
    x = torch.ones(4)
    case = MODELS["gpt"]
    graph = capture_of_rank(case.make(), case.batch(4, 0)[0], 0, 1)
    with pytest.raises(ClusterError, match="other collectives than rank 0"):
        OperatorTimes.load("cpu", sharing=2).measure([graph] * (1 + rank), ReplayGroup.live())
    dist.all_reduce(x)  # nobody waits for a rank that has left
    return str(x.sum())


def test_ranks_that_would_time_other_collectives_say_so() -> None:
    assert run(rehearse_unlike, 2) == ["tensor(8.)"] * 2


class Pair(torch.nn.Module):
    """A model with an argument by name alone."""

    def forward(self, x: Tensor, *, y: Tensor) -> Tensor:
        return (x - y).square().mean()


@pytest.mark.parametrize("inputs", [(torch.ones(2, 4),), {"x": torch.ones(2, 4)}])
def test_examples_that_forward_does_not_take(inputs: Any) -> None:
    with pytest.raises(autopar.StrategyError, match=r"do not fit Pair\.forward.*missing .*'y'"):
        autopar.plan(Pair(), 2, example_inputs=inputs, strategy="ddp")


def test_arguments_without_values() -> None:
    model = autopar.compile(torch.nn.Linear(4, 4))
    with pytest.raises(autopar.BatchError, match="meta device, which holds no values"):
        model(torch.empty(2, 4, device="meta"))


def test_names_that_are_not_text() -> None:
    model = nn.Sequential()
    model.add_module("half \ud800", nn.Linear(4, 4))
    for make in (autopar.compile, lambda it, **inputs: autopar.plan(it, 2, **inputs)):
        with pytest.raises(autopar.ModelError, match=r"half .* is not Unicode text: rename it"):
            make(model, example_inputs=(torch.rand(8, 4),))


@pytest.mark.parametrize("name", ["", "absent/file", "half \ud800", "a NUL \0"])
def test_files_that_cannot_be_written(tmp_path: Path, name: str) -> None:
    plan = example_plan()
    for write in (plan.save, plan.report, autopar.Cluster.default(2).save):
        with pytest.raises(autopar.AutoparError, match=r"cannot write .*Give another file"):
            write(tmp_path / name)
