"""How one model trained on several ranks, and what was said about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks.truth.training import Trained, deviation

EXACT = 1e-9

OUTCOMES = ("exact", "told", "noted", "silent", "crash")
"""`noted` differs with nothing but a note in the plan: silent, but for those who print plans."""


class Answer(NamedTuple):
    """What one rank has to report.

    Attributes:
        trained: None if it raised.
        warned: warnings of autopar.
        notes: notes of the plan.
        fell_back: whether torch's own DDP or fully_shard trained.
        refusal: class and message of an error of autopar.
        crash: traceback of any other error.
    """

    trained: Trained | None = None
    warned: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    fell_back: bool = False
    refusal: str = ""
    crash: str = ""


@dataclass(frozen=True)
class Case:
    """One model under one strategy.

    Attributes:
        number: of the model, by which it is drawn again.
        name: its blocks and traits.
        strategy: name of the setup.
        ranks: world size.
        recipe: fields of the `Recipe`.
        outcome: one of `OUTCOMES`.
        deviation: worst deviation from one process; None if it did not train.
        of: tensor that deviates most.
        said: warnings, notes, or the error.
        fell_back: whether torch's own DDP or fully_shard trained.
        seconds: wall-clock time of the distributed training.
    """

    number: int
    name: str
    strategy: str
    ranks: int
    recipe: dict[str, Any]
    outcome: str
    deviation: float | None = None
    of: str = ""
    said: tuple[str, ...] = ()
    fell_back: bool = False
    seconds: float = 0.0


def judged(answers: Sequence[Answer], want: Trained) -> dict[str, Any]:
    """Outcome and the rest of a case whose ranks all answered, by field."""
    if crashes := [answer.crash for answer in answers if answer.crash]:
        return {"outcome": "crash", "said": tuple(crashes[:1])}
    said = tuple(dict.fromkeys(line for answer in answers for line in answer.warned))
    if refusals := [answer.refusal for answer in answers if answer.refusal]:
        return {"outcome": _refused(refusals, len(answers)), "said": (*refusals[:1], *said)}
    states = [answer.trained for answer in answers if answer.trained]
    worst, of = max(_deviations(states, want))
    notes = tuple(dict.fromkeys(note for answer in answers for note in answer.notes))
    outcome = "exact" if worst <= EXACT else "told" if said else "noted" if notes else "silent"
    fell_back = answers[0].fell_back
    return {
        "outcome": outcome,
        "deviation": worst,
        "of": of,
        "said": said or notes,
        "fell_back": fell_back,
    }


def _refused(refusals: list[str], ranks: int) -> str:
    """An error tells if every rank raises it, and it is not that another rank is gone."""
    gone = all(refusal.startswith("CommunicationError") for refusal in refusals)
    return "told" if len(refusals) == ranks and not gone else "crash"


def _deviations(trained: Sequence[Trained], want: Trained) -> Iterable[tuple[float, str]]:
    """Deviation of every rank in what it holds; all ranks together must hold everything."""
    held = set().union(*(rank.state for rank in trained))
    if missing := sorted(want.state.keys() - held):
        yield float("inf"), f"{missing[0]} (on no rank)"
    for rank in trained:
        own = {name: value for name, value in want.state.items() if name in rank.state}
        yield deviation(rank, Trained(want.losses, own))


def counts(cases: Iterable[Case]) -> dict[str, dict[str, int]]:
    """Outcomes by strategy, and of all."""
    table: dict[str, Counter[str]] = {}
    for case in cases:
        for row in (case.strategy, "all"):
            table.setdefault(row, Counter())[case.outcome] += 1
    return {row: {name: found[name] for name in OUTCOMES} for row, found in table.items()}
