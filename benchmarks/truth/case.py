"""`Setup`: a strategy that leaves nothing to choose, so that nothing is measured; `Case`: one model
trained under one setup, and its outcome."""

from __future__ import annotations

import logging
import random
import time
import traceback
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from math import lcm
from typing import Any, Literal, NamedTuple

import torch

import autopar
from autopar.cost_model.cluster.cluster import Cluster
from benchmarks.report import outcome_counts
from benchmarks.truth.draw import train_plain
from benchmarks.truth.inputs import ROW_NUMBERS
from benchmarks.truth.recipe import Recipe, Trained, batch_of, deviation, train
from tests.harness.training import whole
from tests.harness.worlds import RankError, run

EXACT = 1e-9
TIMEOUT_S = 150.0

OUTCOMES = ("exact", "reported", "noted", "silent", "crash")
"""`noted` differs with nothing but a note in the plan: silent, except to readers of plans."""

DIFFERENCE_WARNINGS = ("NumericsWarning", "FallbackWarning", "LossyWarning")
"""Classes of warnings about different numbers; others may be about the cost of exactness."""


FIXED = {"recompute": "none", "gather_bytes": 1 << 14, "reduce_bytes": 1 << 14, "prefetch": 1}


@dataclass(frozen=True)
class Setup:
    """Fields of a strategy, possible world sizes, and whether each rank brings its own rows."""

    options: dict[str, Any]
    ranks: tuple[int, ...] = (2, 3)
    batch: Literal["global", "local"] = "global"

    @property
    def is_local(self) -> bool:
        return self.batch == "local"

    def suits(self, recipe: Recipe) -> bool:
        """Whether the rows can be divided before the call: no input numbers rows."""
        return not (self.is_local and ROW_NUMBERS & set(recipe.inputs))

    def fit(self, recipe: Recipe, ranks: int) -> Recipe:
        """Return the recipe with rows that divide into ranks and micro-batches."""
        micro_batches = self.options.get("micro_batches", 1)
        shares = 1 if "pp" in self.options else ranks
        multiple = shares * micro_batches if micro_batches > 1 or self.is_local else 1
        return replace(recipe, rows=recipe.rows + -recipe.rows % lcm(recipe.divides, multiple))


_PIPELINE = {"zero": 0, "pp": 2, "schedule": "1f1b"}
SETUPS = {
    "ddp": Setup({"zero": 0}),
    "zero3": Setup({"zero": 3}),
    "tp2": Setup({"zero": 0, "tp": 2}, (2,)),
    "cp2": Setup({"zero": 0, "cp": 2}, (2,)),
    "cp2-zero3": Setup({"zero": 3, "cp": 2}, (2,)),
    "ep2-zero3": Setup({"zero": 3, "ep": 2}, (2,)),
    "pp2": Setup({**_PIPELINE, "micro_batches": 1}, (2,)),
    "pp2x2": Setup({**_PIPELINE, "micro_batches": 2}, (2,)),
    "ddpx2": Setup({"zero": 0, "micro_batches": 2}),
    "ddp-local": Setup({"zero": 0}, batch="local"),
    "zero3-local": Setup({"zero": 3}, batch="local"),
}
"""Name -> setup; "x2" means two micro-batches."""

DRAWN = ("zero3", "tp2", "cp2", "cp2-zero3", "ep2-zero3", "pp2", "pp2x2", "ddpx2")
"""Setups of which each model trains under two random ones."""


def setups_of(seed: int, number: int) -> list[tuple[str, int]]:
    """Return ddp and two more setups for a model, each with a number of ranks."""
    rng = random.Random(f"{seed}/{number}/setups")
    names = ["ddp", *sorted(rng.sample(DRAWN, 2))]
    return [(name, rng.choice(SETUPS[name].ranks)) for name in names]


class Answer(NamedTuple):
    """Report of one rank."""

    trained: Trained | None = None
    warned: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # of the plan
    fell_back: bool = False  # torch's own DDP or fully_shard trained
    refusal: str = ""  # an error of autopar
    crash: str = ""  # any other error


@dataclass(frozen=True)
class Case:
    """One model under one strategy: its outcome, and the worst deviation from one process."""

    number: int  # of the model in its seed
    name: str
    strategy: str
    ranks: int
    recipe: dict[str, Any]
    outcome: str
    deviation: float | None = None  # None if it did not train
    tensor: str = ""  # with that deviation
    messages: tuple[str, ...] = ()  # warnings, notes, or the error
    fell_back: bool = False
    seconds: float = 0.0  # of the distributed training


def run_case(number: int, recipe: Recipe, setup: str, ranks: int) -> Case:
    """Train one model under one setup on processes that later cases reuse."""
    recipe = SETUPS[setup].fit(recipe, ranks)
    start = time.monotonic()
    try:
        answers = run(train_on_rank, ranks, timeout=TIMEOUT_S, recipe=recipe, setup=setup)
        found = judge(answers, train_plain(recipe))
    except RankError as error:
        first = [f"rank {rank}: {text.splitlines()[0]}" for rank, text in error.errors.items()]
        message = f"{'; '.join(first)}\n{str(error)[-4000:]}"
        found = {"outcome": "crash", "messages": (message,)}
    seconds = round(time.monotonic() - start, 2)
    return Case(number, recipe.name, setup, ranks, asdict(recipe), seconds=seconds, **found)


def train_on_rank(rank: int, world_size: int, recipe: Recipe, setup: str) -> Answer:
    """Train a compiled model and report; errors are part of the report."""
    options = SETUPS[setup]
    share = (rank, world_size) if options.is_local else (0, 1)
    args, kwargs = batch_of(recipe, 0, share)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logging.disable(logging.CRITICAL)  # torch logs the errors that it raises
        try:
            model = autopar.compile(
                recipe.make(),
                strategy=autopar.Strategy(**{**FIXED, **options.options}),
                batch=options.batch,
                rows=0 if options.is_local else None,  # the blocks couple them
                cluster=Cluster.default(world_size, "cpu"),
                example_inputs=(kwargs or args) if recipe.example_inputs else None,
                time_limit_s=None,
            )
            torch.manual_seed(recipe.seed)
            trained = _on_this_rank(train(model, recipe, share=share))
            notes = tuple(map(str, model.plan.notes)) if model.plan else ()
            made = Answer(trained, notes=notes, fell_back=model.plan is None)
        except autopar.AutoparError as error:
            made = Answer(refusal=f"{type(error).__name__}: {error}")
        except Exception as error:
            made = Answer(crash=f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        finally:
            logging.disable(logging.NOTSET)
    return made._replace(warned=tuple(str(w.message) for w in caught if _reports(w)))


def _on_this_rank(trained: Trained) -> Trained:
    """Gathered state."""
    return Trained(trained.losses, {name: whole(t) for name, t in trained.state.items()})


def _reports(warning: warnings.WarningMessage) -> bool:
    """Whether a warning is about different numbers, or about autopar not training."""
    by_class = warning.category.__name__ in DIFFERENCE_WARNINGS
    return by_class or (warning.category is UserWarning and "autopar" in str(warning.message))


def judge(answers: Sequence[Answer], want: Trained) -> dict[str, Any]:
    """Return the outcome of a case and related fields."""
    if crashes := [answer.crash for answer in answers if answer.crash]:
        return {"outcome": "crash", "messages": tuple(crashes[:1])}
    warned = tuple(dict.fromkeys(line for answer in answers for line in answer.warned))
    if refusals := [answer.refusal for answer in answers if answer.refusal]:
        lost = all(refusal.startswith("CommunicationError") for refusal in refusals)
        outcome = "reported" if len(refusals) == len(answers) and not lost else "crash"
        return {"outcome": outcome, "messages": (*refusals[:1], *warned)}
    worst, tensor = max(_deviations([a.trained for a in answers if a.trained], want))
    notes = tuple(dict.fromkeys(note for answer in answers for note in answer.notes))
    if worst <= EXACT:
        outcome = "exact"
    else:
        outcome = "reported" if warned else "noted" if notes else "silent"
    return {
        "outcome": outcome,
        "deviation": worst,
        "tensor": tensor,
        "messages": warned or notes,
        "fell_back": answers[0].fell_back,
    }


def _deviations(trained: Sequence[Trained], want: Trained) -> Iterable[tuple[float, str]]:
    """Deviation of every rank's state; all ranks together must have everything."""
    present = set().union(*(rank.state for rank in trained))
    if missing := sorted(want.state.keys() - present):
        yield float("inf"), f"{missing[0]} (on no rank)"
    for rank in trained:
        state = {name: value for name, value in want.state.items() if name in rank.state}
        yield deviation(rank, Trained(want.losses, state))


def counts(cases: Iterable[Case]) -> dict[str, dict[str, int]]:
    """Return the number of cases of each outcome by strategy, and of all."""
    pairs = ((row, case.outcome) for case in cases for row in (case.strategy, "all"))
    return outcome_counts(pairs, OUTCOMES)
