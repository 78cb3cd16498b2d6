"""From what was measured to regrets: of each race and cap, and of all of them.

Regret is the median step of the plan chosen over the least median of all that fit, peers included.
What fits is known by counting, not by prediction. A plan that was chosen and is one of the
enumeration has run once, so that noise cannot part it from itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from scipy.stats import spearmanr

from benchmarks.contenders import PLAIN
from benchmarks.regret.field import DATA_PARALLEL, REPLICATED, chosen_name
from benchmarks.report import TOLERANCE

LEAST_ORDERED = 4
"""Plans that an order is told of; of fewer it is chance."""


@dataclass(frozen=True)
class Entry:
    """What a race tells of a contender.

    Attributes:
        name: of the contender.
        step_s: median of its steps; None if there are none.
        held_bytes: counted at the peak of a step, and the batch.
        predicted_s: the step as predicted, of plans alone.
        predicted_bytes: the same of `held_bytes`.
        same: the contender that this one turned out to be.
        error: why there are no figures, or why they do not count.
    """

    name: str
    step_s: float | None = None
    held_bytes: int | None = None
    predicted_s: float | None = None
    predicted_bytes: int | None = None
    same: str | None = None
    error: str | None = None

    @property
    def error_of_step(self) -> float | None:
        """By how much the prediction of the step is wrong, relative to what was measured."""
        if self.step_s is None or self.predicted_s is None:
            return None
        return self.predicted_s / self.step_s - 1

    def within(self, cap: float) -> bool:
        """Whether it ran, and held no more than that."""
        return self.step_s is not None and (self.held_bytes or 0) <= cap


@dataclass(frozen=True)
class Verdict:
    """What came of one race under one cap.

    Attributes:
        cap: as a share of what plain replication needs; None for no cap.
        cap_bytes: the same in bytes.
        chosen: the plan chosen, or the contender that it is; None if there was none.
        chosen_s: its median step.
        best: the fastest that fits.
        best_s: its median step.
        regret: one by the other.
        by_prediction: of the enumeration, which one is predicted to be the fastest that fits.
        regret_by_prediction: what choosing that would cost.
        gain: the median step of the faster of DDP and fully_shard by that of the plan chosen.
        median_error: of the predicted steps of all plans that fit.
        order: Spearman's rank correlation of their predicted and measured steps.
        exceeding: plans that hold more than the cap though they are predicted to fit.
    """

    model: str
    cluster: str
    rate: str
    cap: float | None
    cap_bytes: int | None
    chosen: str | None
    chosen_s: float | None
    best: str | None
    best_s: float | None
    regret: float | None
    by_prediction: str | None
    regret_by_prediction: float | None
    gain: float | None
    median_error: float | None
    order: float | None
    exceeding: tuple[str, ...]


def entries(outcome: Mapping[str, Any]) -> dict[str, Entry]:
    """Return what the outcome of a race says of everyone, by name."""
    results = {result["contender"]: result for result in outcome["contenders"]}
    batch = results.get(REPLICATED, {}).get("batch_bytes", 0)
    return {name: _entry(name, results, outcome[REFERENCE], batch) for name in results}


REFERENCE = "reference"
"""Where an outcome has the losses of the plain model."""


def _entry(name: str, results: Mapping[str, Any], reference: Sequence[float], batch: int) -> Entry:
    own = results[name]
    ran = results.get(own.get("same"), own)
    error = own["error"] or ran["error"]
    if error is None:
        error = _difference(ran["losses"], reference)
    return Entry(
        name=name,
        step_s=median(ran["seconds"]) if error is None else None,
        held_bytes=ran["peak_bytes"] + batch if error is None else None,
        predicted_s=own.get("predicted_s"),
        predicted_bytes=own.get("predicted_bytes"),
        same=own.get("same"),
        error=error,
    )


def _difference(losses: Sequence[float], reference: Sequence[float]) -> str | None:
    pairs = list(zip(losses, reference, strict=False))  # a race may end early
    worst = max((abs(a / b - 1) for a, b in pairs), default=math.inf)
    if worst <= TOLERANCE:
        return None
    return f"losses differ by {worst:.1e} from those of {PLAIN}"


def verdict(race: Mapping[str, Any], share: float | None) -> Verdict:
    """Return what came of a race under one of its caps."""
    found = entries(race)
    needed = found[REPLICATED].predicted_bytes if REPLICATED in found else None
    cap = math.inf if share is None or needed is None else int(share * needed)
    fit = {name: entry for name, entry in found.items() if entry.within(cap)}
    best = min(fit.values(), key=_step, default=None)
    chosen = found.get(chosen_name(share))
    if chosen is not None and chosen.step_s is None:
        chosen = None
    plans = [e for e in fit.values() if e.predicted_s is not None and e.same is None]
    expected = [
        e
        for e in found.values()
        if e.predicted_s is not None
        and e.step_s is not None
        and not e.name.startswith("chosen")
        and (e.predicted_bytes or 0) <= cap
    ]
    foreseen = min(expected, key=lambda e: e.predicted_s or 0.0, default=None)
    peers = [fit[name] for name in DATA_PARALLEL if name in fit]
    return Verdict(
        model=race["model"],
        cluster=race["cluster"],
        rate=race["rate"],
        cap=share,
        cap_bytes=None if cap == math.inf else int(cap),
        chosen=chosen and (chosen.same or chosen.name),
        chosen_s=chosen and chosen.step_s,
        best=best and best.name,
        best_s=best and best.step_s,
        regret=_ratio(chosen, best),
        by_prediction=foreseen and foreseen.name,
        regret_by_prediction=_ratio(foreseen, best),
        gain=_ratio(min(peers, key=_step, default=None), chosen),
        median_error=_median(abs(e.error_of_step or 0.0) for e in plans),
        order=order_of(plans),
        exceeding=tuple(
            e.name
            for e in found.values()
            if e.held_bytes is not None
            and e.predicted_bytes is not None
            and e.predicted_bytes <= cap < e.held_bytes
        ),
    )


def _step(entry: Entry) -> float:
    return entry.step_s or math.inf


def _ratio(one: Entry | None, other: Entry | None) -> float | None:
    if one is None or other is None:
        return None
    return _step(one) / _step(other)


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return median(found) if found else None


def order_of(plans: Sequence[Entry]) -> float | None:
    """Return Spearman's rank correlation of predicted and measured steps, if there are enough."""
    if len(plans) < LEAST_ORDERED:
        return None
    pairs = [(plan.predicted_s, plan.step_s) for plan in plans]
    return float(spearmanr(pairs).statistic)


def summary(cases: Sequence[Verdict]) -> dict[str, Any]:
    """Return what all cases say together.

    `median`, `worst` and `gain` (a geometric mean) are of the plans chosen. Where none was chosen
    though something fits, regret is infinite.
    """
    regrets = [c.regret if c.regret is not None else math.inf for c in cases if c.best]
    foreseen = [c.regret_by_prediction for c in cases if c.regret_by_prediction is not None]
    gains = [math.log(c.gain) for c in cases if c.gain is not None]
    orders = [c.order for c in cases if c.order is not None]
    return {
        "median": _median(regrets),
        "worst": max(regrets, default=None),
        "gain": math.exp(sum(gains) / len(gains)) if gains else None,
        "by_prediction": {"median": _median(foreseen), "worst": max(foreseen, default=None)},
        "prediction": {
            "median_error": _median(c.median_error for c in cases if c.median_error is not None),
            "least_order": min(orders, default=None),
            "median_order": _median(orders),
            "exceeding": sum(len(c.exceeding) for c in cases),
        },
        "cases": [asdict(case) for case in cases],
    }
