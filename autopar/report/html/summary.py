"""Head of the page: the verdict, the plan in a few figures, and the parts of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from autopar.core.plan.plan import Plan
from autopar.core.plan.prediction import Prediction
from autopar.formatting import duration, human_bytes
from autopar.report.error_bars import PredictionInterval, memory_interval, step_interval
from autopar.report.explain import parts_of_step
from autopar.report.html.figures import amount, count, seconds, share, size
from autopar.report.html.markup import Markup, join, legend, tag
from autopar.report.precision import precision_line
from autopar.report.verdict import verdict

_LOOKS = ("g-compute", "g-optimizer", "g-wait", "g-memory", "g-depends", "g-slow")

_NOTHING = (
    "Nothing was predicted: the strategy left nothing to choose, so nothing was measured. A "
    "memory cap, or a strategy that leaves something open, makes a prediction."
)


def summary(plan: Plan) -> Markup:
    """Renders the head of the page."""
    p = plan.prediction
    mesh = " × ".join(f"{axis} {ranks}" for axis, ranks in plan.mesh)
    tiles = [_tile("Ranks", count(plan.world_size), mesh)]
    if p is not None:
        tiles += _predicted(plan, p)
    ranks = "1 rank" if plan.world_size == 1 else f"{plan.world_size:,} ranks"
    return tag(
        "header",
        tag("p", "autopar plan", class_="brand"),
        tag("h1", f"{plan.model} on {ranks}"),
        tag("p", plan.name, class_="name"),
        *(tag("p", line, class_="name") for line in precision_line(plan)),
        tag("ul", *_verdict(plan, p), class_="verdict") if p else tag("p", _NOTHING, class_="note"),
        tag("dl", *tiles, class_="tiles"),
        _goes(p) if p is not None else None,
    )


def _verdict(plan: Plan, p: Prediction) -> Iterator[Markup]:
    """Whether the plan fits, what bounds it, and its gain over usual layouts."""
    needs = "A rank needs ", size(p.needed_bytes)
    if plan.memory_cap is None:
        yield _line("Memory:", *needs, "; no cap was given.")
    elif (room := plan.memory_cap - p.needed_bytes) >= 0:
        yield _line("It fits:", size(room), " of ", size(plan.memory_cap), " a rank stay free.")
    else:
        yield _line("It does not fit:", *needs, " of ", size(plan.memory_cap), ".")
    parts = parts_of_step(p)
    first = max(parts, key=lambda name: parts[name])
    part = parts[first] / p.step_s if p.step_s else 0.0
    yield _line("Bound by", f"{first}: ", seconds(parts[first]), ", ", share(part), " of the step.")
    if plan.search is not None:
        yield _line("Verdict:", f"{verdict(plan, plan.search, p.step_s)}.")


def _line(first: str, *rest: object) -> Markup:
    return tag("li", tag("b", first), " ", *rest)


def _predicted(plan: Plan, p: Prediction) -> list[Markup]:
    waits = p.exposed_s / p.step_s if p.step_s else 0.0
    found = [
        _tile("Step", seconds(p.step_s), *_bounds(step_interval(p), p.step_s, seconds, duration)),
        *_throughput(plan, p),
        _tile("Memory of a rank", size(p.needed_bytes), *_memory(plan, p)),
        _tile("Waits for messages", seconds(p.exposed_s), share(waits), " of the step"),
    ]
    if p.stages:
        found.append(_tile("Pipeline idle", share(p.bubble), "of all ranks' time"))
    if sent := sum(nbytes for _, nbytes in plan.sent_bytes):
        over = ", ".join(f"{human_bytes(n)} over {axis}" for axis, n in plan.sent_bytes)
        found.append(_tile("A rank sends", size(sent), f"a step: {over}"))
    return found


def _throughput(plan: Plan, p: Prediction) -> list[Markup]:
    """Throughput of all ranks, and their hardware utilisation."""
    if p.work is None or not p.step_s:
        return []
    done, kind = (p.work.tokens, "Tokens") if p.work.tokens else (p.work.rows, "Rows")
    used = p.work.utilisation(p.step_s, plan.world_size)
    slow, fast = map(amount, step_interval(p).of_rate(done / p.step_s))
    more: tuple[object, ...] = slow, " to ", fast
    if used:
        low, high = map(share, step_interval(p).of_rate(used))
        formula = (
            f"MFU: {p.work.flops:.3g} FLOP a step ÷ ({duration(p.step_s)} × {plan.world_size:,} "
            f"ranks × {p.work.peak / 1e12:,.0f} TFLOP/s)"
        )
        more += "; ", share(used), " (", low, " to ", high, f") of the devices' peak. {formula}"
    return [_tile(f"{kind} a second", amount(done / p.step_s), *more)]


def _bounds(
    bar: PredictionInterval,
    value: float,
    figure: Callable[[float], Markup],
    text: Callable[[float], str],
) -> tuple[object, ...]:
    """Interval of a figure; the section on sources says of what."""
    low, high = bar.of(value)
    return (figure(low),) if text(low) == text(high) else (figure(low), " to ", figure(high))


def _memory(plan: Plan, p: Prediction) -> tuple[object, ...]:
    """Interval of the peak, and the part of the cap that is needed, with a gauge."""
    within = (
        *(size(p.peak_bytes), " of tensors ("),
        *(*_bounds(memory_interval(p), p.peak_bytes, size, human_bytes), ")"),
    )
    if plan.memory_cap is None:
        return (*within, "; no cap was given")
    part = p.needed_bytes / plan.memory_cap
    width = f"width:{min(1.0, part) * 100:.4g}%"
    gauge = tag("span", tag("i", style=width), class_="bar", aria_hidden="true")
    needed = share(part), " of the cap of ", size(plan.memory_cap)
    return (*within, "; ", *needed, gauge)


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
    titles = {name: f"{name} {duration(s)}" for name, s in shown.items()}
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
    return join(tag("h2", "Parts of a step"), bar, legend(rows))
