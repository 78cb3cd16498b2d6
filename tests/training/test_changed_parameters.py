"""Frozen parameters that forward changes, as a teacher's that follow a student's (BYOL, MoCo)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar import Strategy
from autopar.core.plan.layout import Layout
from tests.harness.model_parts import generator
from tests.harness.models import Case
from tests.harness.reference import Reference, batches, reference, train_steps
from tests.harness.training import ADAMW, assert_same_training, fixed, whole_state
from tests.harness.worlds import run

WIDTH, ROWS, STEPS = 6, 8, 4
CHANGED = ("teacher.0.weight", "teacher.0.bias")


class Taught(nn.Module):
    """The teacher is a moving average of the student, taken in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.student = nn.Sequential(nn.Linear(WIDTH, WIDTH))
        self.teacher = nn.Sequential(nn.Linear(WIDTH, WIDTH)).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        with torch.no_grad():
            wanted = self.teacher(h)
            if self.training:
                both = zip(self.teacher.parameters(), self.student.parameters(), strict=True)
                for slow, fast in both:
                    slow.mul_(0.9).add_(fast, alpha=0.1)
        out = self.student(h)
        return F.mse_loss(self.head(out), x) + F.mse_loss(out, wanted)


def make() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Taught()


def rows_of(rows: int, seed: int) -> Any:
    return (torch.randn(rows, WIDTH, generator=generator(seed)),), {}


TAUGHT = Case("taught", make, rows_of, lambda loss: loss)
(EXAMPLE,) = next(iter(batches(TAUGHT, [0], ROWS)))[0]


def train(
    rank: int, world_size: int, early: bool = False, rows: int = ROWS, **options: Any
) -> tuple[Reference, autopar.Plan, float]:
    """Training, and the loss of evaluation behind it."""
    given = {"example_inputs": EXAMPLE} if early else {}
    model = autopar.compile(make().double(), world_size, fallback=False, **options, **given)
    optimizer = ADAMW(model.parameters())
    losses = train_steps(model, optimizer, TAUGHT, batches(TAUGHT, range(STEPS), rows))
    state = whole_state(model)
    with torch.no_grad():
        last = model.eval()(EXAMPLE).item()
    return Reference(losses, state), model.plan, last


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(
    "strategy",
    [fixed(0), fixed(2), fixed(3), Strategy(tp=2), Strategy(pp=2), Strategy(pp=2, micro_batches=2)],
    ids=["ddp", "zero2", "zero3", "tp", "pp", "micro-batches"],
)
def test_a_teacher_follows_as_on_one_device(strategy: Strategy, early: bool) -> None:
    want = reference(TAUGHT, STEPS, torch.float64, ADAMW, ROWS)
    plain = make().double()
    plain.load_state_dict(want.state)
    expected = plain.eval()(EXAMPLE).item()
    for got, plan, evaluated in run(train, 2, strategy=strategy, early=early):
        assert_same_training(got, want, 1e-9)
        assert evaluated == pytest.approx(expected, rel=1e-12)
        assert plan.changed == CHANGED
        assert all(set(map(str, Layout(plan).of(name).values())) == {"R"} for name in CHANGED)


def test_uneven_rows_on_three_ranks() -> None:
    want = reference(TAUGHT, STEPS, torch.float64, ADAMW, 13)
    for got, _, _ in run(train, 3, strategy=fixed(3), rows=13):
        assert_same_training(got, want, 1e-9)


@pytest.mark.parametrize("strategy", [fixed(3), Strategy(pp=2)], ids=["zero3", "pp"])
def test_a_plan_from_a_file_knows_of_it(strategy: Strategy, tmp_path: Path) -> None:
    plan = autopar.plan(
        make().double(), world_size=2, example_inputs=EXAMPLE, strategy=strategy, batch="global"
    )
    plan.save(tmp_path / "plan.json")
    read = autopar.Plan.load(tmp_path / "plan.json")
    assert read.changed == CHANGED
    want = reference(TAUGHT, STEPS, torch.float64, ADAMW, ROWS)
    for got, _, _ in run(evaluate_first, 2, path=str(tmp_path / "plan.json")):
        assert_same_training(got, want, 1e-9)


def evaluate_first(rank: int, world_size: int, path: str) -> tuple[Reference, autopar.Plan, float]:
    """A first call that changes nothing is given the teacher as the calls behind it are."""
    given = autopar.Plan.load(path)
    model = autopar.compile(make().double(), world_size, plan=given, fallback=False)
    optimizer = ADAMW(model.parameters())
    with torch.no_grad():
        first = model.eval()(EXAMPLE).item()
    losses = train_steps(model.train(), optimizer, TAUGHT, batches(TAUGHT, range(STEPS), ROWS))
    return Reference(losses, whole_state(model)), given, first


def plan_in_evaluation(rank: int, world_size: int) -> None:
    model = autopar.compile(make().double().eval(), strategy="zero3", example_inputs=EXAMPLE)
    model.train()(EXAMPLE)


def test_a_plan_that_does_not_know_of_it_is_refused() -> None:
    for error, said in run(plan_in_evaluation, 2, expect_errors=True):
        assert error == "StrategyError"
        assert "frozen parameter teacher.0" in said


def thaw(rank: int, world_size: int) -> None:
    model = autopar.compile(make().double(), strategy="ddp")
    model(EXAMPLE).backward()
    model.requires_grad_()
    model(EXAMPLE).backward()


def test_it_cannot_be_trained_too() -> None:
    for error, said in run(thaw, 2, expect_errors=True):
        assert error == "StrategyError"
        assert "teacher.0.weight was frozen" in said


def test_parameters_that_are_trained_may_not_be_changed() -> None:
    model = autopar.compile(make().requires_grad_(), fallback=False)
    with pytest.raises(
        autopar.CaptureError, match=r"parameter teacher.0.weight in place.* freeze it"
    ):
        model(EXAMPLE.float())
