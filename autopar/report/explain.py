"""`explain`: bottleneck of a plan, sensitivity of the choice, and why other plans lost."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from autopar.formatting import duration, human_bytes, printable
from autopar.report.table import exposures, layout, levels, lower_level, predicted
from autopar.report.verdict import (
    unpriced_layouts,
    usual_layouts,
    usual_names,
    verdict_lines,
)

if TYPE_CHECKING:
    from autopar.core.plan.plan import Plan
    from autopar.core.plan.prediction import Prediction, RunnerUp


def with_reasons(plan: Plan) -> str:
    """Table of a plan, with the explanation instead of its figures."""
    notes = (f"note: {note}" for note in plan.notes)
    return printable("\n".join([*layout(plan), *notes, explain(plan)]))


def explain(plan: Plan) -> str:
    """Bottleneck of the step, sensitivity of the choice, and why each runner-up lost."""
    lines = [f"Chosen: {plan.name}.", *levels(plan), *predicted(plan), *verdict_lines(plan)]
    p = plan.prediction
    if p is not None:
        lines += [*_bound(p), *exposures(p, len(p.exposures))]
        if plan.memory_cap is not None:
            room = plan.memory_cap - p.needed_bytes
            lines.append(f"{human_bytes(room)} of {human_bytes(plan.memory_cap)} stay free.")
            again = Counter(level for _, level in plan.recompute if level != "none")
            if again:
                parts = ", ".join(f"{level} in {count}" for level, count in again.items())
                blocks = f"{parts} of {len(plan.recompute)} blocks"
                lines.append(f"Memory costs time: activations are computed again ({blocks}).")
            if away := len(plan.offload):
                parts = f"those of {away} of {len(plan.recompute)} blocks lie {lower_level(plan)}"
                lines.append(f"Memory costs time: activations leave it ({parts}).")
            if plan.offload_parameters:
                lines.append(
                    f"Memory costs time: parameters lie {lower_level(plan)} between their uses."
                )
            if plan.loss_chunks > 1:
                lines.append(
                    f"Memory costs time: logits are computed twice, in {plan.loss_chunks} chunks."
                )
        figures = ", ".join(f"{count} {kind}" for kind, count in sorted(p.provenance.items()))
        lines.append(f"Figures: {figures}. Cluster: {plan.cluster}.")
        if changes := [*_memory(plan, p), *_links(plan, p)]:
            lines += ["What would change the choice, of the plans that were looked at:", *changes]
    lines += _alternatives(plan)
    return printable("\n".join(lines))


def _alternatives(plan: Plan) -> Iterator[str]:
    """Other plans of the search and usual layouts, each with its figures and why it lost."""
    others = {other.name: other for other in plan.runners_up}
    if plan.prediction is not None:
        others = {other.name: other for other in usual_layouts(plan)} | others
    others.pop(plan.name, None)
    labels, unpriced = usual_names(plan), unpriced_layouts(plan)
    if others or unpriced:
        yield "Also considered:"
    for other in sorted(others.values(), key=lambda other: other.step_s):
        label = f" ({labels[other.name]})" if other.name in labels else ""
        size = human_bytes(other.peak_bytes)
        yield f"  {other.name}{label}: {duration(other.step_s)}, {size}: {other.why}"
    for name, why in unpriced.items():
        yield f"  {name}: {why}"


def parts_of_step(p: Prediction) -> dict[str, float]:
    """Seconds of each part of a step, which they make up."""
    others = "waits for other ranks of the pipeline" if p.stages else "waits for the host"
    return {
        "computation": p.compute_s,
        "messages that computation waits for": p.exposed_s,
        "the optimizer's step": p.update_s,
        others: p.idle_s,
    }


def _bound(p: Prediction) -> Iterator[str]:
    """Largest part of the step, and the largest stalls."""
    parts = parts_of_step(p)
    first = max(parts, key=lambda name: parts[name])
    share = parts[first] / p.step_s if p.step_s else 0.0
    hidden = max(0.0, p.communication_s - p.exposed_s)
    yield (
        f"The step is bound by {first}: {duration(parts[first])}, {share:.0%} of it. It waits "
        f"{duration(p.exposed_s)} for messages, and hides {duration(hidden)} of them."
    )
    waits = defaultdict[str, float](float)
    for item in p.exposures:
        waits[f"{item.collective} over {item.axis}"] += item.exposed_s
    most = sorted(waits.items(), key=lambda wait: -wait[1])
    if texts := [f"{name} {duration(s)}" for name, s in most if s > 0.01 * p.step_s]:
        yield f"Of the messages it waits most for {', '.join(texts)}."
    if p.stages:
        yield f"Ranks of the pipeline wait for others {', '.join(f'{s:.0%}' for s in p.idle)}."


def _memory(plan: Plan, p: Prediction) -> Iterator[str]:
    """Memory caps that would change the choice."""
    cap, least = plan.memory_cap, p.step_s
    larger = [o for o in plan.runners_up if cap is not None and o.needed_bytes > cap]
    for other in sorted(larger, key=lambda other: (other.needed_bytes, other.step_s)):
        if other.step_s < least:
            least = other.step_s
            size = human_bytes(other.needed_bytes)
            yield f"  with {size} a rank or more: {other.name}, {duration(p.step_s - least)} faster"
    smaller = [o for o in plan.runners_up if 0 < o.needed_bytes < p.needed_bytes]
    text = f"  the choice fits down to {human_bytes(p.needed_bytes)} a rank"
    if smaller:
        other = min(smaller, key=lambda other: other.step_s)
        text += f"; below that: {other.name}, {duration(other.step_s - p.step_s)} slower"
    yield text


def _links(plan: Plan, p: Prediction) -> Iterator[str]:
    """Link bandwidths that would change the choice."""
    if not p.at_rates:
        return
    steps = ", ".join(f"{duration(s)} at {rate:g} of it" for rate, s in p.at_rates)
    yield f"  at another rate of all links the step takes: {steps}"
    cap = plan.memory_cap
    fitting = (o for o in plan.runners_up if cap is None or o.needed_bytes <= cap)
    alternatives = [other for other in fitting if other.at_rates]
    found = [(rate, other) for other in alternatives for rate in _crossings(p, other)]
    slow = max((item for item in found if item[0] < 1.0), key=lambda item: item[0], default=None)
    fast = min((item for item in found if item[0] > 1.0), key=lambda item: item[0], default=None)
    if slow is not None:
        yield f"  with links at {slow[0]:.2g} of their rate or less: {slow[1].name}"
    if fast is not None:
        yield f"  with links {fast[0]:.2g} times as fast or faster: {fast[1].name}"
    if alternatives and slow is None and fast is None:
        names, rates = "; ".join(o.name for o in alternatives), [rate for rate, _ in p.at_rates]
        low, high = rates[0], rates[-1]
        yield f"  from {low:g} to {high:g} of the links' rate it stays ahead of {names}"


def _crossings(p: Prediction, other: RunnerUp) -> Iterator[float]:
    """Factors of bandwidth at which another plan becomes faster.

    Step time is interpolated between simulated factors, linearly in the inverse bandwidth.
    """
    ours, theirs = dict(p.at_rates), dict(other.at_rates)
    behind = {rate: theirs[rate] - s for rate, s in ours.items() if rate in theirs}
    behind[1.0] = other.step_s - p.step_s
    for low, high in pairwise(sorted(behind)):
        # Searches outwards from the real rate 1: the choice still leads at `first`, the nearer one.
        first, second = (high, low) if high <= 1.0 else (low, high)
        if behind[first] >= 0.0 > behind[second]:
            part = behind[first] / (behind[first] - behind[second])
            yield 1.0 / ((1.0 - part) / first + part / second)
