"""Head of the page: the plan in five figures, and the parts of a step."""

from __future__ import annotations

from collections.abc import Callable

from autopar.formatting import human_bytes
from autopar.plan.prediction import Prediction
from autopar.plan.spec import PlanSpec
from autopar.report.error_bars import PredictionInterval, memory_interval, step_interval
from autopar.report.html.figures import amount, count, seconds, seconds_text, share, size
from autopar.report.html.markup import Markup, join, legend, tag
from autopar.report.verdict import verdict_lines

_LOOKS = ("g-compute", "g-optimizer", "g-wait", "g-memory", "g-depends", "g-slow")

_NOTHING = (
    "Nothing was predicted: the strategy left nothing to choose, so nothing was measured. A "
    "memory cap, or a strategy that leaves something open, makes a prediction."
)


def summary(plan: PlanSpec) -> Markup:
    """Renders the head of the page."""
    p = plan.prediction
    mesh = " × ".join(f"{axis} {ranks}" for axis, ranks in plan.mesh)
    tiles = [_tile("Ranks", count(plan.world_size), mesh)]
    if p is not None:
        tiles += _predicted(plan, p)
    ranks = "1 rank" if plan.world_size == 1 else f"{plan.world_size} ranks"
    return tag(
        "header",
        tag("p", "autopar plan", class_="brand"),
        tag("h1", f"{plan.model} on {ranks}"),
        tag("p", plan.name, class_="name"),
        *(tag("p", line, class_="note") for line in verdict_lines(plan)),
        tag("dl", *tiles, class_="tiles"),
        _goes(p) if p is not None else tag("p", _NOTHING, class_="note"),
    )


def _predicted(plan: PlanSpec, p: Prediction) -> list[Markup]:
    waits = p.exposed_s / p.step_s if p.step_s else 0.0
    kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(p.provenance.items()))
    within = *_bounds(step_interval(p), p.step_s, seconds), "; "
    held = "; ", *_bounds(memory_interval(p), p.peak_bytes, size)
    found = [
        _tile("Step", seconds(p.step_s), *within, f"predicted from figures: {kinds}"),
        *_throughput(plan, p),
        _tile("Memory of a rank", size(p.peak_bytes), *_cap(plan, p), *held),
        _tile("Waits for messages", seconds(p.exposed_s), share(waits), " of the step"),
    ]
    if p.stages:
        found.append(_tile("Pipeline idle", share(p.bubble), "of all ranks' time"))
    if sent := sum(nbytes for _, nbytes in plan.sent_bytes):
        over = ", ".join(f"{human_bytes(n)} over {axis}" for axis, n in plan.sent_bytes)
        found.append(_tile("A rank sends", size(sent), f"a step: {over}"))
    return found


def _throughput(plan: PlanSpec, p: Prediction) -> list[Markup]:
    """Throughput of all ranks, and their hardware utilisation."""
    if p.work is None or not p.step_s:
        return []
    done, kind = (p.work.tokens, "Tokens") if p.work.tokens else (p.work.rows, "Rows")
    used = p.work.utilisation(p.step_s, plan.world_size)
    slow, fast = map(amount, step_interval(p).of_rate(done / p.step_s))
    more: tuple[object, ...] = slow, " to ", fast
    if used:
        low, high = map(share, step_interval(p).of_rate(used))
        more += "; ", share(used), " (", low, " to ", high, ") of the devices' peak, in model FLOPs"
    return [_tile(f"{kind} a second", amount(done / p.step_s), *more)]


def _bounds(
    bar: PredictionInterval, value: float, figure: Callable[[float], Markup]
) -> tuple[object, ...]:
    low, high = map(figure, bar.of(value))
    return low, " to ", high, f" as nine in ten of {bar.source}"


def _cap(plan: PlanSpec, p: Prediction) -> tuple[object, ...]:
    if plan.memory_cap is None:
        return ("at the peak; no cap was given",)
    part = p.needed_bytes / plan.memory_cap
    width = f"width:{min(1.0, part) * 100:.4g}%"
    gauge = tag("span", tag("i", style=width), class_="bar", aria_hidden="true")
    return share(part), " of the cap of ", size(plan.memory_cap), " is needed", gauge


def _tile(name: str, figure: object, *more: object) -> Markup:
    return tag("div", tag("dt", name), tag("dd", figure), tag("dd", *more, class_="more"))


def _goes(p: Prediction) -> Markup:
    """Bar of the parts of the step."""
    parts = {"compute": p.compute_s, "optimizer": p.update_s}
    rest = max(0.0, p.step_s - p.compute_s - p.update_s)
    if p.stages:
        parts["waiting for other ranks and messages"] = rest
    else:
        causes = {f"waiting: {cause}": s for cause, s in p.causes.items()}
        known = sum(causes.values())
        scale = min(1.0, rest / known) if known else 0.0
        parts |= {name: s * scale for name, s in causes.items()}
        parts["slowed down by messages under way"] = rest - known * scale
    shown = {name: s for name, s in parts.items() if s > 1e-4 * p.step_s}
    looks = dict(zip(parts, _LOOKS, strict=False))
    titles = {name: f"{name} {seconds_text(s)}" for name, s in shown.items()}
    bar = tag(
        "div",
        *(
            tag("i", class_=looks[n], style=f"flex:{s / p.step_s:.5g}", title=titles[n])
            for n, s in shown.items()
        ),
        class_="goes",
        role="img",
        aria_label="; ".join(titles.values()),
    )
    rows = ((looks[name], name, " ", seconds(s)) for name, s in shown.items())
    return join(tag("h2", "Where a step goes"), bar, legend(rows))
