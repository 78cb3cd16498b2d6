"""Regrets from measurements, of each race and cap, and of all of them.

Regret is the median step of the chosen plan over the least median of all contenders that fit the
cap by their counted bytes, peers included. A chosen plan that equals one of the enumeration has run
once, so that noise cannot separate them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median
from typing import Any

from rich.table import Table
from scipy.stats import spearmanr

from benchmarks.contenders import PLAIN
from benchmarks.regret.plans import CHOSEN, PEERS, REPLICATED, chosen_name
from benchmarks.report import TOLERANCE, empty_table, loss_difference, number

MIN_ORDERED = 4  # fewest plans with a rank correlation

COMPARED = 10
"""Losses that are compared. Rounding grows: after 34 steps the conv net under DDP is 1e-3 off."""


@dataclass(frozen=True)
class Entry:
    name: str  # name of the contender
    step_s: float | None = None  # median of its steps, in seconds; None if there are none
    mean_step_s: float | None = None  # the same for the mean rank, not the last one
    measured_bytes: int | None = None  # counted bytes at the peak of a step, plus the batch
    predicted_s: float | None = None  # predicted step, for plans alone
    predicted_bytes: int | None = None  # prediction of `measured_bytes`
    same: str | None = None  # contender with the same plan
    error: str | None = None  # reason why there are no valid figures

    @property
    def step_error(self) -> float | None:
        return self._error(self.step_s)

    @property
    def mean_step_error(self) -> float | None:
        return self._error(self.mean_step_s)

    def _error(self, measured_s: float | None) -> float | None:
        if measured_s is None or self.predicted_s is None:
            return None
        return self.predicted_s / measured_s - 1

    def fits(self, cap: float) -> bool:
        """Whether it ran, within a cap in bytes."""
        return self.step_s is not None and (self.measured_bytes or 0) <= cap


def entries(race: Mapping[str, Any]) -> dict[str, Entry]:
    results = {result["contender"]: result for result in race["contenders"]}
    batch_bytes = results.get(REPLICATED, {}).get("batch_bytes", 0)
    found = {}
    for name, result in results.items():
        ran = results.get(result.get("same"), result)
        error = result["error"] or ran["error"]
        if error is None:
            worst = loss_difference(ran["losses"][:COMPARED], race["reference"])
            error = f"losses differ by {worst:.1e} from those of {PLAIN}"
            error = error if worst > TOLERANCE else None
        predictions = {key: result.get(key) for key in ("predicted_s", "predicted_bytes", "same")}
        found[name] = Entry(name, **predictions, error=error)
        if error is None:
            found[name] = Entry(
                name,
                step_s=median(ran["seconds"]),
                mean_step_s=median(ran.get("mean_seconds") or ran["seconds"]),
                measured_bytes=ran["peak_bytes"] + batch_bytes,
                **predictions,
            )
    return found


def verdict(race: Mapping[str, Any], share: float | None) -> dict[str, Any]:
    """Return the result of a race under one of its caps, a share of the memory of `REPLICATED`.

    `chosen` is the chosen plan, or the contender with the same plan. `best` is the fastest
    contender that fits, and `regret` the ratio of their steps. `by_prediction` is the fastest plan
    of the enumeration that fits, by prediction. `gain` is the step of the faster of DDP and
    fully_shard over that of the chosen plan. `order` is Spearman's correlation of predicted and
    measured steps of plans that fit. `exceeding` are plans above the cap, predicted to fit.

    A step begins at a barrier and ends with the last rank. In training the ranks take their mean,
    which predictions are of, so there is an error of each.
    """
    found = entries(race)
    needed = found[REPLICATED].predicted_bytes if REPLICATED in found else None
    cap = math.inf if share is None or needed is None else int(share * needed)
    fitting = {name: entry for name, entry in found.items() if entry.fits(cap)}
    best = min(fitting.values(), key=_step, default=None)
    chosen = found.get(chosen_name(share))
    if chosen is not None and chosen.step_s is None:
        chosen = None
    plans = [e for e in fitting.values() if e.predicted_s is not None and e.same is None]
    candidates = [
        e
        for e in found.values()
        if e.step_error is not None
        and not e.name.startswith(CHOSEN)
        and (e.predicted_bytes or 0) <= cap
    ]
    predicted = min(candidates, key=lambda e: e.predicted_s or 0.0, default=None)
    peers = [fitting[peer.name] for peer in PEERS if peer.name in fitting]
    return {
        **{key: race[key] for key in ("model", "cluster", "rate")},
        "cap": share,
        "cap_bytes": None if cap == math.inf else int(cap),
        "chosen": chosen and (chosen.same or chosen.name),
        "chosen_s": chosen and chosen.step_s,
        "best": best and best.name,
        "best_s": best and best.step_s,
        "regret": _ratio(chosen, best),
        "by_prediction": predicted and predicted.name,
        "regret_by_prediction": _ratio(predicted, best),
        "gain": _ratio(min(peers, key=_step, default=None), chosen),
        "median_error": _median(abs(e.step_error or 0.0) for e in plans),
        "median_error_of_mean_rank": _median(abs(e.mean_step_error or 0.0) for e in plans),
        "order": rank_correlation(plans),
        "exceeding": [
            e.name
            for e in found.values()
            if e.measured_bytes is not None
            and e.predicted_bytes is not None
            and e.predicted_bytes <= cap < e.measured_bytes
        ],
    }


def _step(entry: Entry) -> float:
    return entry.step_s or math.inf


def _ratio(a: Entry | None, b: Entry | None) -> float | None:
    return None if a is None or b is None else _step(a) / _step(b)


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return median(found) if found else None


def rank_correlation(plans: Sequence[Entry]) -> float | None:
    if len(plans) < MIN_ORDERED:
        return None
    return float(spearmanr([(plan.predicted_s, plan.step_s) for plan in plans]).statistic)


def summary(cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return figures over all verdicts.

    `median`, `worst` and `gain` (a geometric mean) are of chosen plans. Regret is infinite where
    none was chosen though something fits.
    """

    def known(key: str) -> list[float]:
        return [case[key] for case in cases if case[key] is not None]

    regrets = [math.inf if c["regret"] is None else c["regret"] for c in cases if c["best"]]
    predicted, orders = known("regret_by_prediction"), known("order")
    return {
        "median": _median(regrets),
        "worst": max(regrets, default=None),
        "gain": geometric_mean(known("gain")) if known("gain") else None,
        "by_prediction": {"median": _median(predicted), "worst": max(predicted, default=None)},
        "prediction": {
            "median_error": _median(known("median_error")),
            "median_error_of_mean_rank": _median(known("median_error_of_mean_rank")),
            "least_order": min(orders, default=None),
            "median_order": _median(orders),
            "exceeding": sum(len(case["exceeding"]) for case in cases),
        },
        "cases": list(cases),
    }


def race_table(race: Mapping[str, Any]) -> Table:
    title = f"{race['model']}, {race['cluster']} at {race['rate'] or 'one node'}"
    headings = ("step, ms", "predicted", "", "peak, MiB", "predicted", "")
    drawn = empty_table(f"{title}, {race['took_s']:.0f} s", "", headings)
    for entry in sorted(entries(race).values(), key=_step):
        measured, predicted = entry.measured_bytes, entry.predicted_bytes
        memory_error = predicted / measured - 1 if predicted and measured else None
        drawn.add_row(
            entry.name if entry.same is None else f"{entry.name} = {entry.same}",
            number(entry.step_s, 1e3, ".0f"),
            number(entry.predicted_s, 1e3, ".0f"),
            number(entry.step_error, 1, "+.0%"),
            number(measured, 2**-20, ".1f"),
            number(predicted, 2**-20, ".1f"),
            number(memory_error, 1, "+.1%"),
            style="red" if entry.error else "",
        )
    return drawn


def overview(document: Mapping[str, Any]) -> Table:
    headings = ("regret", "by prediction", "gain", "error", "order", "chosen", "best")
    drawn = empty_table("regret", "", headings)
    for case in document["cases"]:
        cap = "" if case["cap"] is None else f", cap {case['cap']:g}"
        cluster = " at ".join(filter(None, (case["cluster"], case["rate"])))
        drawn.add_row(
            f"{case['model']}, {cluster}{cap}",
            number(case["regret"], 1, ".3f"),
            number(case["regret_by_prediction"], 1, ".3f"),
            number(case["gain"], 1, ".2f"),
            number(case["median_error"], 1, ".0%"),
            number(case["order"], 1, ".2f"),
            case["chosen"] or "nothing",
            case["best"] or "nothing",
        )
    prediction = document["prediction"]
    drawn.caption = (
        f"regret: median {number(document['median'], 1, '.3f')}, "
        f"worst {number(document['worst'], 1, '.3f')}; gain {number(document['gain'], 1, '.2f')}; "
        f"error of steps {number(prediction['median_error'], 1, '.1%')}, "
        f"least order {number(prediction['least_order'], 1, '.2f')}, "
        f"exceeding {prediction['exceeding']}"
    )
    return drawn
