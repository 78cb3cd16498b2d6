"""`Cell`: a strategy to run layers under; `Case`: a sample in a cell, and what came of it."""

from __future__ import annotations

import logging
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

import autopar
from autopar.errors import FallbackWarning, LossyWarning, NumericsWarning
from benchmarks.loops.case import Setup
from benchmarks.operators.layer import (
    Layer,
    Sample,
    deviation,
    filled_memory,
    observe,
    samples,
)
from benchmarks.report import outcome_counts
from tests.harness.worlds import RankError, run

OUTCOMES = ("exact", "told", "silent", "raw", "crashed", "hung")
"""Told: an error of autopar, or a warning about other numbers. Raw: any other error."""

FAILURES = ("silent", "raw", "crashed", "hung")

TIMEOUT_S = 60.0
"""Seconds for the samples of one operator."""

Work = tuple[str, int | None]
"""An operator, and the number of a sample, or None for all."""


@dataclass(frozen=True)
class Cell:
    """A setup on a number of ranks."""

    setup: Setup
    ranks: int


CELLS: Mapping[str, Cell] = {
    "one": Cell(Setup({"zero": 0}), 1),
    "tp2": Cell(Setup({"zero": 0, "tp": 2}), 2),
    "ddp": Cell(Setup({"zero": 0}), 2),
    "zero3": Cell(Setup({"zero": 3}), 2),
}


@dataclass(frozen=True)
class Case:
    """A sample of an operator in a cell.

    Attributes:
        outcome: one of `OUTCOMES`; empty where eager raises, returns memory without values, or
            draws on several ranks.
        deviation: largest relative difference from eager in multiples of the tolerance.
        place: the value with that difference.
        message: the error or warning.
        logged: what torch logged as an error meanwhile.
    """

    operator: str
    number: int
    cell: str
    outcome: str
    deviation: float | None = None
    place: str = ""
    message: str = ""
    logged: str = ""
    seconds: float = 0.0


class ErrorLog(logging.Handler):
    """Keeps what torch's loggers say of errors."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def run_cases(
    names: Sequence[str],
    cell: str,
    seed: int,
    count: int,
    on_rank: Callable[..., list[Case]] | None = None,
) -> list[Case]:
    """Runs samples of operators; where a process dies or hangs, operators and samples apart.

    `on_rank` takes the place of `cases_on_rank`.
    """
    options = {"cell": cell, "seed": seed, "count": count}
    work: list[Work] = [(name, None) for name in names]
    return list(_run_apart(on_rank or cases_on_rank, work, options))


def _run_apart(
    on_rank: Callable[..., list[Case]], work: Sequence[Work], options: Mapping[str, Any]
) -> Iterable[Case]:
    """The cases of all work, at last each sample by itself."""
    ranks, timeout = CELLS[options["cell"]].ranks, TIMEOUT_S * len(work)
    try:
        yield from _merged(run(on_rank, ranks, timeout=timeout, work=work, **options))
    except RankError as error:
        died = any(text.startswith("died") for text in error.errors.values())
        if not died and not any("still busy" in text for text in error.errors.values()):
            raise
        if len(work) > 1:
            for piece in work:
                yield from _run_apart(on_rank, [piece], options)
            return
        name, number = work[0]
        if number is None:
            for sample in samples(name, options["seed"], options["count"]):
                yield from _run_apart(on_rank, [(name, sample.number)], options)
            return
        outcome = "crashed" if died else "hung"
        yield Case(name, number, options["cell"], outcome, message=str(error)[-2000:])


def _merged(answers: Sequence[Sequence[Case]]) -> list[Case]:
    """One case a sample, of those of all ranks."""
    return [_worst(cases) for cases in zip(*answers, strict=True)]


def _worst(cases: Sequence[Case]) -> Case:
    """The case of the rank with the worst outcome.

    Where some ranks alone raise an error of autopar, the others' next collective would hang.
    """
    order = ("", *OUTCOMES)
    worst = max(cases, key=lambda case: (order.index(case.outcome), case.deviation or 0.0))
    refused = [case.deviation is None and case.outcome == "told" for case in cases]
    if any(refused) and not all(refused):
        first = cases[refused.index(True)]
        return replace(first, outcome="raw", message=f"on some ranks alone: {first.message}")
    return worst


def cases_on_rank(
    rank: int,
    world_size: int,
    work: Sequence[Work],
    cell: str,
    seed: int,
    count: int,
) -> list[Case]:
    """The cases of operators on this rank."""
    return [
        case_of(sample, cell, seed)
        for name, number in work
        for sample in samples(name, seed, count)
        if number is None or sample.number == number
    ]


def case_of(sample: Sample, cell: str, seed: int) -> Case:
    """The outcome of a sample on this rank."""
    start, log = time.monotonic(), ErrorLog()
    torch_log = logging.getLogger("torch")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wanted = _wanted(sample, seed, drawing=CELLS[cell].ranks == 1)
        if wanted is None:
            return Case(sample.operator, sample.number, cell, "")
        torch_log.addHandler(log)
        try:
            outcome = _compared(sample, cell, seed, wanted)
        finally:
            torch_log.removeHandler(log)
    told = (NumericsWarning, FallbackWarning, LossyWarning)
    warned = [str(w.message) for w in caught if issubclass(w.category, told)]
    if outcome["outcome"] == "silent" and warned:
        outcome |= {"outcome": "told", "message": warned[0]}
    seconds = round(time.monotonic() - start, 2)
    logged = log.lines[0][:200] if log.lines else ""
    return Case(sample.operator, sample.number, cell, logged=logged, seconds=seconds, **outcome)


def _wanted(sample: Sample, seed: int, drawing: bool) -> dict[str, Any] | None:
    """Values of the plain layer; None if it raises, or returns memory without values.

    None also for an operator that draws, without `drawing`: ranks draw numbers of their own.
    """
    fresh = torch.Generator().manual_seed(seed).get_state()
    try:
        values = observe(Layer(sample), sample, seed)
        if not drawing and not torch.equal(torch.get_rng_state(), fresh):
            return None
        with filled_memory():
            again = observe(Layer(sample), sample, seed)
    except Exception:
        return None
    return values if deviation(again, values)[0] <= 1 else None


def _compared(sample: Sample, cell: str, seed: int, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The outcome of a compiled layer and related fields of a case."""
    chosen = CELLS[cell]
    try:
        model = chosen.setup.compile(Layer(sample), chosen.ranks, fallback=False)
        worst, place = deviation(observe(model, sample, seed), wanted)
    except autopar.AutoparError as error:
        return {"outcome": "told", "message": f"{type(error).__name__}: {error}"}
    except Exception as error:
        lines = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        return {"outcome": "raw", "message": lines[:300] + lines[-1500:]}
    return {"outcome": "exact" if worst <= 1 else "silent", "deviation": worst, "place": place}


def counts(cases: Iterable[Case]) -> dict[str, dict[str, int]]:
    """The number of samples of each outcome, by cell."""
    return outcome_counts(((case.cell, case.outcome) for case in cases), OUTCOMES)


def facts(case: Case) -> dict[str, Any]:
    """A case for a result file, without what is empty."""
    short = replace(case, message=case.message[:200])
    return {name: value for name, value in asdict(short).items() if value not in ("", None)}
