"""`Setup`: a strategy to train a loop under; `Case`: a loop under it, and what came of it."""

from __future__ import annotations

import logging
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

from torch import nn

import autopar
from autopar.cost_model.cluster.cluster import Cluster
from autopar.errors import FallbackWarning, LossyWarning, NumericsWarning
from autopar.runtime.parameters.distribute import is_remote
from benchmarks.loops.draw import elements_of, train_in_float32, train_plain
from benchmarks.loops.loop import Loop, Observed, Recipe
from benchmarks.loops.rounding import OtherRounding
from benchmarks.report import outcome_counts
from tests.harness.training import whole_state
from tests.harness.worlds import RankError, run

EXACT, EXACT_BFLOAT16 = 1e-8, 0.02
TIMEOUT_S = 900.0
NOISE = 2.0**-9
"""Relative noise of weights that bfloat16 would round away."""

OUTCOMES = ("exact", "told", "silent", "raw", "hung")
"""Told: an error of autopar, or a warning about other numbers. Raw: any other error."""

_FIXED = {"recompute": "none", "gather_bytes": 1 << 14, "reduce_bytes": 1 << 14, "prefetch": 1}


@dataclass(frozen=True)
class Setup:
    """A strategy with nothing left to measure, and whose rows a rank brings."""

    strategy: Mapping[str, Any] | str
    batch: Literal["global", "local"] = "global"

    def compile(self, model: nn.Module, ranks: int, **options: Any) -> Any:
        """The compiled model; `options` are further ones of `autopar.compile`."""
        strategy = self.strategy
        return autopar.compile(
            model,
            strategy=strategy
            if isinstance(strategy, str)
            else autopar.Strategy(**{**_FIXED, **strategy}),
            batch=self.batch,
            rows=0 if self.batch == "local" else None,
            cluster=Cluster.default(ranks, "cpu"),
            time_limit_s=None,
            **options,
        )


SETUPS: Mapping[str, Setup] = {
    "ddp": Setup({"zero": 0}),
    "zero2": Setup({"zero": 2}),
    "zero3": Setup({"zero": 3}),
    "tp2": Setup({"zero": 0, "tp": 2}),
    "pp2": Setup({"zero": 0, "pp": 2, "schedule": "1f1b", "micro_batches": 2}),
    "cp2": Setup({"zero": 0, "cp": 2}),
    "cp2-zero3": Setup({"zero": 3, "cp": 2}),
    "ep2-zero3": Setup({"zero": 3, "ep": 2}),
    "auto": Setup("auto"),
    "offload": Setup({"zero": 0, "offload": "activations", "offload_dir": tempfile.gettempdir()}),
    "ddp-local": Setup({"zero": 0}, "local"),
    "zero3-local": Setup({"zero": 3}, "local"),
}


class Answer(NamedTuple):
    """The report of one rank."""

    observed: Observed | None = None
    warned: tuple[str, ...] = ()
    refusal: str = ""
    raw: str = ""


@dataclass(frozen=True)
class Case:
    """A loop under its setup.

    Attributes:
        outcome: one of `OUTCOMES`.
        deviation: largest relative difference from one process, None if it did not train.
        place: the number or tensor with that difference.
        message: the error or warning.
    """

    number: int
    recipe: dict[str, Any]
    name: str
    outcome: str
    deviation: float | None = None
    place: str = ""
    message: str = ""
    seconds: float = 0.0


def run_case(number: int, recipe: Recipe) -> Case:
    """Trains by a recipe on processes that later cases reuse."""
    start = time.monotonic()
    outcome: dict[str, Any]
    try:
        answers = run(train_on_rank, recipe.ranks, timeout=TIMEOUT_S, recipe=recipe)
        plain = train_plain(recipe)
        outcome = judge(answers, plain, tolerance_of(recipe, plain))
        if outcome["outcome"] == "silent":
            outcome = _judge_again(outcome, recipe, plain)
    except RankError as error:
        is_late = any("timed out" in e or "busy" in e for e in error.errors.values())
        outcome = {"outcome": "hung" if is_late else "raw", "message": str(error)[-3000:]}
    seconds = round(time.monotonic() - start, 2)
    return Case(number, asdict(recipe), recipe.name, seconds=seconds, **outcome)


def tolerance_of(recipe: Recipe, plain: Observed) -> float:
    """The largest relative difference that is rounding.

    In bfloat16 it is thrice what rounding does to the plain loop, where that is more than usual.
    """
    if recipe.compute == "float64":
        return EXACT
    rounding, _ = max(_differences([train_in_float32(recipe)], plain))
    return max(EXACT_BFLOAT16, 3 * rounding)


def _judge_again(outcome: dict[str, Any], recipe: Recipe, plain: Observed) -> dict[str, Any]:
    """The outcome of a loop beyond the tolerance.

    In float64 it is rounding if each of three plain loops that round otherwise differs by more.
    In bfloat16 gradients of few rows under batch norm cancel, and ranks round their terms. That is
    rounding if the loop is exact in float64, and within ten times what plain loops nearby do:
    from other weights, or with operators that round otherwise.
    """
    if recipe.compute == "float64":
        rounding = min(_difference_by_rounding(recipe, plain, seed) for seed in range(3))
        if outcome["deviation"] > rounding:
            return outcome
        return {**outcome, "outcome": "exact", "message": f"rounding alone gives {rounding:.1g}"}
    in_float64 = run_case(0, replace(recipe, compute="float64"))
    nearby = [train_plain(recipe, NOISE, seed) for seed in range(3)]
    nearby += [_with_other_rounding(recipe, seed) for seed in range(3)]
    rounding, _ = max(_differences([train_in_float32(recipe), *nearby], plain))
    if in_float64.outcome != "exact" or outcome["deviation"] > 10 * rounding:
        return outcome
    return {**outcome, "outcome": "exact", "message": f"rounding, as {rounding:.1g} of plain loops"}


def _difference_by_rounding(recipe: Recipe, plain: Observed, seed: int) -> float:
    difference, _ = max(_differences([_with_other_rounding(recipe, seed)], plain))
    return difference


def _with_other_rounding(recipe: Recipe, seed: int) -> Observed:
    with OtherRounding(seed):
        return train_plain(recipe)


def train_on_rank(rank: int, world_size: int, recipe: Recipe) -> Answer:
    """Trains a compiled model; errors are part of the answer."""
    setup = SETUPS[recipe.setup]
    share = (rank, world_size) if setup.batch == "local" else (0, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logging.disable(logging.CRITICAL)  # torch logs the errors that it raises
        try:
            precision = "bf16" if recipe.casts_forward else None
            model = setup.compile(recipe.make(), world_size, precision=precision)
            compile_other = lambda other: setup.compile(other, world_size)  # noqa: E731
            values = Loop(recipe, model, elements_of(recipe), compile_other, share).run()
            state = {
                n: t.detach().clone() for n, t in whole_state(model).items() if not is_remote(t)
            }
            answer = Answer(Observed(values, state))
        except autopar.AutoparError as error:
            answer = Answer(refusal=f"{type(error).__name__}: {error}")
        except Exception as error:
            answer = Answer(raw=f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        finally:
            logging.disable(logging.NOTSET)
    told = (NumericsWarning, FallbackWarning, LossyWarning)
    warned = tuple(str(w.message) for w in caught if issubclass(w.category, told))
    return answer._replace(warned=warned)


def judge(answers: Sequence[Answer], plain: Observed, tolerance: float = EXACT) -> dict[str, Any]:
    """The outcome of a case and its other fields."""
    if raw := [answer.raw for answer in answers if answer.raw]:
        return {"outcome": "raw", "message": raw[0]}
    warned = [line for answer in answers for line in answer.warned]
    if refusals := [answer.refusal for answer in answers if answer.refusal]:
        # ranks whose peers are gone raise too, but then nobody has said why
        lost = all(refusal.startswith("CommunicationError") for refusal in refusals)
        together = len(refusals) == len(answers) and not lost
        return {"outcome": "told" if together else "raw", "message": refusals[0]}
    observed = [answer.observed for answer in answers if answer.observed]
    deviation, place = max(_differences(observed, plain))
    outcome = "exact" if deviation <= tolerance else "told" if warned else "silent"
    message = warned[0] if warned else ""
    return {"outcome": outcome, "deviation": deviation, "place": place, "message": message}


def _differences(observed: Iterable[Observed], plain: Observed) -> Iterable[tuple[float, str]]:
    for each in observed:
        if len(each.values) != len(plain.values):
            yield float("inf"), f"{len(each.values)} numbers for {len(plain.values)}"
        for index, (value, wanted) in enumerate(zip(each.values, plain.values, strict=False)):
            yield _relative(value, wanted), f"number {index}"
        for name, tensor in each.state.items():
            wanted_tensor = plain.state[name].double()
            difference = (tensor.double() - wanted_tensor).norm().item()
            yield _relative(difference + wanted_tensor.norm().item(), wanted_tensor.norm()), name
    held = {name for each in observed for name in each.state}
    if missing := sorted(plain.state.keys() - held):
        yield float("inf"), f"{missing[0]} (on no rank)"


def _relative(value: float, wanted: Any) -> float:
    if value != value and float(wanted) != float(wanted):
        return 0.0
    difference = abs(value - float(wanted)) / (abs(float(wanted)) + 1e-3)
    return difference if difference == difference else float("inf")


def counts(cases: Iterable[Case]) -> dict[str, dict[str, int]]:
    """The number of cases of each outcome, by setup and of all."""
    pairs = ((row, case.outcome) for case in cases for row in (case.recipe["setup"], "all"))
    return outcome_counts(pairs, OUTCOMES)
