"""verify: a plan beside the plain model."""

import contextlib
import io
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.cli import verify as verify_command
from autopar.cli.main import main
from autopar.core.common.constant_draws import ConstantDraws
from autopar.runtime.spmd.executor import SpmdCall, SpmdExecutor
from autopar.train.verification.deviation import Comparison, Deviation
from tests.harness.models import MODELS
from tests.harness.training import fixed, rows_of
from tests.harness.worlds import Raised, run
from tests.runtime.test_fallback import Branching
from tests.runtime.test_fallback import rows as rows_of_step

Found = tuple[autopar.Verification, str]
"""A result, and what was printed."""


@contextlib.contextmanager
def printed() -> Iterator[io.StringIO]:
    with contextlib.redirect_stdout(io.StringIO()) as text:
        yield text


def verified(
    rank: int, world_size: int, *, name: str, rows: int, batch: str = "global", **options: Any
) -> Found:
    case = MODELS[name]
    torch.manual_seed(rank)  # compile gives every rank rank 0's parameters
    given = case.batch(rows, 0)
    if batch == "local":
        given = rows_of(given, rank, world_size)
    inputs = given[0] or given[1]
    with printed() as text:
        result = autopar.verify(
            case.make(), example_inputs=inputs, loss=case.loss, batch=batch, **options
        )
        return result, text.getvalue()


WAYS = {
    "uneven rows, zero3": ("gpt", {"rows": 5, "strategy": fixed(3, "full")}),
    "dropout in micro-batches": ("dropout", {"rows": 8, "strategy": fixed(0, pp=2)}),
    "dropout on uneven rows": ("dropout", {"rows": 5, "strategy": fixed(1)}),
    "own rows": ("conv", {"rows": 6, "batch": "local", "strategy": fixed(2)}),
    "one model on both ranks": ("gpt", {"rows": 5, "strategy": fixed(0, tp=2)}),
    "given AdamW": ("gpt", {"rows": 6, "strategy": fixed(3), "optimizer": torch.optim.AdamW}),
    "float32": ("gpt", {"rows": 6, "strategy": fixed(0), "double": False}),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_equal_one(way: str) -> None:
    name, options = WAYS[way]
    (first, said), (second, silent) = run(verified, 2, name=name, timeout=300, **options)
    assert first == second
    assert first.passed, str(first)
    assert first.tolerance == (1e-5 if way == "float32" else 1e-9)
    assert silent == ""
    assert said == f"{first}\n"
    assert said.startswith("PASS: 3 steps on 2 ranks")
    assert first.draws == (("bernoulli",) if name == "dropout" else ())
    assert (first.buffer is not None) == (name == "conv")
    assert first.loss.error < first.tolerance


def test_one_rank_equals_the_model() -> None:
    result, text = verified(0, 1, name="conv", rows=6)
    assert result.passed
    assert result.worst.error < 1e-12
    assert "1 rank" in text


# -- what is wrong is found, and named -----------------------------------------------------------


def spoiled_gradient(name: str) -> Callable[..., Any]:
    gradients = SpmdCall._gradients

    def spoiled(call: SpmdCall, *given: Any) -> list[Tensor | None]:
        found = zip(call.operands, gradients(call, *given), strict=True)
        return [g * 1.001 if str(key) == name and g is not None else g for key, g in found]

    return spoiled


def forgotten_updates(executor: SpmdExecutor, call: Any) -> None:
    call.updates.clear()


WRONG: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "gradient": (SpmdCall, "_gradients", spoiled_gradient("head.weight")),
    "buffer": (SpmdExecutor, "_write_updates", forgotten_updates),
}


def broken(rank: int, world_size: int, *, kind: str) -> Found:
    with patch.object(*WRONG[kind]):
        return verified(rank, world_size, name="conv", rows=6, strategy=fixed(0))


@pytest.mark.parametrize(
    ("kind", "worst", "others"),
    [
        ("gradient", "gradient of head.weight differs by 1.0e-03", ("parameter",)),
        ("buffer", "buffer norm1.running_mean differs by 1.0e+00", ()),
    ],
)
def test_a_broken_plan_fails_by_the_right_tensor(
    kind: str, worst: str, others: tuple[str, ...]
) -> None:
    (first, text), (second, _) = run(broken, 2, kind=kind)
    assert first == second
    assert text.startswith("FAIL")
    assert worst in text
    assert first.first is not None
    assert (first.first.kind, first.first.step) == (kind, 1)
    bad = {d.kind for d in first.deviations if d.error > first.tolerance}
    assert {kind, *others} <= bad


def test_rounding_that_an_optimizer_makes_larger_is_no_deviation() -> None:
    gradient = torch.tensor([1.0, 1e-9])
    compared = Comparison(1e-5, torch.finfo(torch.float32).eps)
    compared.add("gradient", 1, {"bias": gradient + torch.tensor([0.0, 2e-9])}, {"bias": gradient})
    parameter = torch.ones(2)
    compared.add("parameter", 1, {"bias": torch.tensor([1.0, 1.1])}, {"bias": parameter})
    assert compared.first is None
    assert "some of bias" in compared.notes[0]
    compared.add("parameter", 2, {"bias": torch.tensor([1.1, 1.1])}, {"bias": parameter})
    assert compared.first == Deviation("parameter", "bias", compared.first.error, 2, (0,))


def test_a_small_element_that_is_wrong_is_a_deviation() -> None:
    gradient = torch.tensor([1.0, 5e-6])
    compared = Comparison(1e-5, torch.finfo(torch.float32).eps)
    compared.add("gradient", 1, {"bias": gradient * torch.tensor([1.0, 2.0])}, {"bias": gradient})
    compared.add("parameter", 1, {"bias": torch.tensor([1.0, 1.1])}, {"bias": torch.ones(2)})
    assert compared.first is not None
    assert compared.first.kind == "parameter"
    assert compared.notes == ()


class Ragged(Branching):
    """A mean over labels that are not ignored, of which ranks have unlike numbers."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        y = self.blocks[1](self.blocks[0](x))
        if y.abs().max() > 1e3:
            y = y / 2
        return F.cross_entropy(y, labels, ignore_index=-1)


def under_ddp(rank: int, world_size: int, *, ragged: bool) -> Found:
    labels = torch.tensor([-1, -1, 0, 1, 2, 3])
    model = Ragged() if ragged else Branching()
    inputs = (rows_of_step(0).float(), labels) if ragged else (rows_of_step(0).float()[:5],)
    told = pytest.warns(autopar.FallbackWarning) if rank == 0 else contextlib.nullcontext()
    with printed() as text, told:
        result = autopar.verify(model, example_inputs=inputs, strategy="ddp")
        return result, text.getvalue()


def test_a_fallback_is_held_against_the_plain_model_too() -> None:
    assert run(under_ddp, 2, ragged=False)[0][0].passed
    result = run(under_ddp, 2, ragged=True)[0][0]
    assert not result.passed
    assert result.loss.error > 1e-3
    assert result.notes == ("the model trained without a plan, under torch's data parallelism",)


def test_what_only_one_side_has_fails() -> None:
    for have, want in (({}, {"a": torch.ones(2)}), ({"a": torch.ones(2)}, {})):
        comparison = Comparison(1e-9, 1e-16)
        comparison.add("gradient", 1, have, want)
        worst = comparison.everywhere()["gradient"]
        assert worst == Deviation("gradient", "a", float("inf"), 1)
        assert "only one side" in str(worst)


# -- nothing of the user's changes ---------------------------------------------------------------


class Tracking(nn.Module):
    """Draws, a buffer, and a product in single precision."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(self.norm(self.layer(x)), 0.5) + torch.randn_like(x)
        return y.float().softmax(-1).square().mean()


def test_model_optimizer_and_random_numbers_stay() -> None:
    model = Tracking()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(6, 4)).backward()
    optimizer.step()
    before = [t.clone() for t in (*model.state_dict().values(), model.layer.weight.grad)]
    moments = optimizer.state[model.layer.weight]["exp_avg"].clone()
    states = torch.get_rng_state(), random.getstate()
    x = torch.randn(6, 4)
    given, states = x.clone(), (torch.get_rng_state(), random.getstate())
    result = autopar.verify(model, example_inputs=(x,), optimizer=optimizer, steps=2)
    assert result.passed
    assert result.steps == 2
    assert set(result.draws) == {"bernoulli", "randn_like"}
    assert result.dtype == torch.float32  # the model casts, so 1e-9 cannot be asked of it
    assert result.tolerance == 1e-5
    after = [*model.state_dict().values(), model.layer.weight.grad]
    assert all(a.equal(b) for a, b in zip(before, after, strict=True))
    assert optimizer.state[model.layer.weight]["exp_avg"].equal(moments)
    assert x.equal(given)
    assert torch.get_rng_state().equal(states[0])
    assert random.getstate() == states[1]


DRAWS: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "bernoulli": (lambda x: torch.bernoulli(x * 0 + 0.25), 1.0),
    "uniform": (lambda x: x.clone().uniform_(2, 4), 3.0),
    "normal": (lambda x: torch.normal(x * 0 + 1, x * 0 + 2), 2.0),
    "randint": (lambda x: torch.randint(3, 9, x.shape), 3.0),
    "rand_like": (torch.rand_like, 0.5),
    "native_dropout": (lambda x: torch.native_dropout(x * 0 + 1, 0.75, True)[0], 4.0),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_constants(name: str) -> None:
    draw, value = DRAWS[name]
    x = torch.ones(3, 5)
    before = torch.get_rng_state()
    with ConstantDraws() as draws:
        assert draw(x).eq(value).all()
    assert list(draws.names) == [name]
    assert torch.get_rng_state().equal(before)  # the loop's next batch is drawn by it


def test_indices_that_are_drawn_are_in_order() -> None:
    with ConstantDraws():
        assert torch.randperm(4).tolist() == [0, 1, 2, 3]
        assert torch.multinomial(torch.ones(2, 3), 2).tolist() == [[0, 1]] * 2


def test_compiled_code_that_draws_is_refused() -> None:
    with pytest.raises(autopar.StrategyError, match="backend='eager'"):
        autopar.verify(Tracking(), example_inputs=(torch.ones(4, 4),), backend="inductor")


# -- compile(verify=True), and the command line ----------------------------------------------------


def first_batch(rank: int, world_size: int, *, wrong: bool, late: bool) -> tuple[str, float]:
    case = MODELS["gpt"]
    args = case.batch(5, 0)[0]
    given = {} if late else {"example_inputs": args}
    with printed() as text:
        strategy = fixed(3)
        model = autopar.compile(case.make(), strategy=strategy, verify=True, **given)
        spoiled = patch.object(SpmdCall, "_gradients", spoiled_gradient("norm.weight"))
        with spoiled if wrong else contextlib.nullcontext():
            with torch.no_grad():
                want = model(*args).item()
            assert text.getvalue() == ""  # evaluating is no training
            losses = [model(*args) for _ in range(2)]
        for loss in losses:
            loss.backward()
    assert all(loss.item() == pytest.approx(want, rel=1e-6) for loss in losses)
    return text.getvalue(), want


@pytest.mark.slow
def test_the_first_batch_is_verified_once() -> None:
    (first, _), (second, _) = run(first_batch, 2, wrong=False, late=True)
    assert first.count("PASS") == 1
    assert second == ""


@pytest.mark.slow
def test_a_wrong_first_batch_raises_on_every_rank() -> None:
    for answer in run(first_batch, 2, wrong=True, late=False, expect_errors=True):
        assert isinstance(answer, Raised)
        assert answer.type == "VerificationError"
        assert "gradient of norm.weight differs" in answer.message


def test_what_trains_without_a_plan_is_told_of() -> None:
    model = autopar.compile(Branching().double(), verify=True)
    with pytest.warns(autopar.FallbackWarning, match="verify=True does not compare"):
        model(rows_of_step(0)).backward()


MAKE = """
import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.dropout = torch.nn.Dropout(0.1)
    def forward(self, x):
        return self.dropout(self.layer(x)).square().mean()
def make():
    return Model(), (torch.randn(7, 4, generator=torch.Generator().manual_seed(torch.seed())),)
"""


@pytest.mark.slow
def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "make.py"
    script.write_text(MAKE)
    options = ["--nproc", "2", "--steps", "2", "--strategy", "zero3", "--json"]
    command = ["verify", str(script), *options]
    assert main(command) == 0
    said = capfd.readouterr()
    result = json.loads(said.out)
    assert result["passed"]
    assert result["parameter"] <= result["tolerance"]
    out = said.err
    assert out.count("PASS") == 1
    assert "PASS: 2 steps on 2 ranks" in out
    assert "random numbers were constants on both sides: bernoulli" in out


def in_this_process(script: str, nproc: int, rest: list[str], environment: dict[str, str]) -> int:
    """The work of `launch`, by one rank, whose gradients are wrong."""
    wrong = patch.object(SpmdCall, "_gradients", spoiled_gradient("layer.weight"))
    with wrong, patch.dict("os.environ", environment):
        return main(rest[1:])


@pytest.mark.parametrize(("name", "status", "said"), [("make", 1, "FAIL"), ("made", 2, "no make")])
def test_the_status_of_the_command(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, status: int, said: str
) -> None:
    script = tmp_path / "make.py"
    script.write_text(MAKE.replace("def make", f"def {name}"))
    with patch.object(verify_command, "launch", in_this_process):
        assert main(["verify", str(script), "--nproc", "1"]) == status
    assert said in "".join(capfd.readouterr())
