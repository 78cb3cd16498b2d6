"""A random part of the truth benchmark."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.truth.__main__ import line, main
from benchmarks.truth.case import Answer, counts, judge, run_case
from benchmarks.truth.draw import recipe, single_block, train_plain, why_unsound
from benchmarks.truth.recipe import Recipe, Trained
from benchmarks.truth.registry import BLOCKS
from tests.harness import worlds

MODELS = 5
SMALL = Recipe(seed=1, stem="rows", blocks=("rolled", "BatchNorm", "mse"), optimizer="sgd")


@pytest.fixture(scope="module", autouse=True)
def _own_workers() -> Iterator[None]:
    """End the processes in which random models ran.

    Some of torch's kernels write out of bounds, and a process dies of that much later.
    """
    yield
    worlds.close()


@pytest.mark.slow
def test_no_model_silently_differs() -> None:
    """Models of a seed under ddp and zero3; the seed repeats it by hand."""
    seed = random.SystemRandom().randrange(1 << 20)
    print(f"python -m benchmarks.truth --models {MODELS} --seed {seed} --strategies ddp,zero3")
    found = [
        run_case(number, recipe(seed, number), setup, 2)
        for number in range(MODELS)
        for setup in ("ddp", "zero3")
    ]
    wrong = [line(it) for it in found if it.outcome not in ("exact", "reported")]
    assert not wrong, "\n".join([f"seed {seed}", *wrong])


def test_a_seed_draws_the_same_models() -> None:
    assert recipe(7, 3) == recipe(7, 3)
    assert recipe(7, 3) != recipe(7, 4)
    first, again = train_plain(recipe(7, 3)), train_plain(recipe(7, 3))
    assert first.losses == again.losses


@pytest.mark.slow
def test_each_block_is_sound() -> None:
    """Each block trains in a model of its own, deterministic and well conditioned."""
    reasons = {name: why_unsound(single_block(name)) for name in BLOCKS}
    assert not {name: reason for name, reason in reasons.items() if reason}


def trained(loss: float) -> Trained:
    """The result of a rank, identified by its loss."""
    return Trained([loss], {"weight": torch.ones(2)})


@pytest.mark.parametrize(
    ("answers", "outcome"),
    [
        ([Answer(trained(1.0))] * 2, "exact"),
        ([Answer(trained(1.0)), Answer(trained(1.1))], "silent"),
        ([Answer(trained(1.1), notes=("as under DDP",))] * 2, "noted"),
        ([Answer(trained(1.1), warned=("autopar: differs",)), Answer(trained(1.1))], "reported"),
        ([Answer(refusal="StrategyError: no")] * 2, "reported"),
        ([Answer(refusal="StrategyError: no"), Answer(trained(1.0))], "crash"),
        ([Answer(refusal="CommunicationError: gone")] * 2, "crash"),
        ([Answer(crash="IndexError: 7"), Answer(trained(1.0))], "crash"),
    ],
)
def test_outcomes(answers: list[Answer], outcome: str) -> None:
    assert judge(answers, trained(1.0))["outcome"] == outcome


def test_state_on_no_rank_is_not_exact() -> None:
    empty = Answer(Trained([1.0], {}))
    assert judge([empty, empty], trained(1.0))["outcome"] == "silent"


def test_cases_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file's recipes are used, not those that the seed draws now."""
    made = run_case(5, SMALL, "cp2", 2)
    assert made.outcome == "exact"
    document = {"cases": [{**vars(made), "outcome": "silent"}], "counts": counts([made])}
    (tmp_path / "before.json").write_text(json.dumps(document))
    after = tmp_path / "after.json"
    assert main(["--again", str(tmp_path / "before.json"), "--json", str(after)]) == 0
    (again,) = json.loads(after.read_text())["cases"]
    assert Recipe.load(again["recipe"]) == SMALL
    assert again["outcome"] == "exact"
