"""`brief`: a plan in a few lines of 80 columns. `figures`: the same facts for JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.text import Text

from autopar.formatting import duration, human_bytes, printable
from autopar.report.error_bars import memory_interval, step_interval
from autopar.report.explain import parts_of_step
from autopar.report.precision import precision_line
from autopar.report.verdict import LOOSE, other_layouts, practised, verdict

if TYPE_CHECKING:
    from autopar.core.plan.plan import Plan
    from autopar.core.plan.prediction import Prediction, RunnerUp
    from autopar.core.plan.search_outcome import SearchOutcome

WIDTH = 80
"""Columns of a terminal."""

_INDENT = 12

_NOTES = 3
"""Number of notes, each whole; the tables have all of them."""

_WORDS: Mapping[str, Any] = {"break_on_hyphens": False, "break_long_words": False}


def brief(plan: Plan) -> str:
    """The plan, its batch and precision, step, memory, bottleneck and closest alternative."""
    ranks = "1 rank" if plan.world_size == 1 else f"{plan.world_size:,} ranks"
    lines = [f"{plan.model} on {ranks}: {plan.name}"]
    lines += (_line("trains", text) for text in precision_line(plan))
    p = plan.prediction
    if p is None:
        lines.append(_line("step", "not predicted: the strategy left nothing to choose"))
    else:
        lines += (_line(name, text) for name, text in _predicted(plan, p))
    lines += (_line("note", note) for note in plan.notes[:_NOTES])
    if (more := len(plan.notes) - _NOTES) > 0:
        notes = "1 more note" if more == 1 else f"{more} more notes"
        lines.append(_line("", f"{notes}: -v or print(plan) shows them all"))
    return printable("\n".join(lines))


def coloured(text: str) -> Text:
    """The lines of `brief` for a terminal: the plan in bold, the names of lines in colour."""
    found = Text(text)
    found.highlight_regex(r"\A.*", "bold")
    found.highlight_regex(r"(?m)^  (\w+( \w+)?)(?=  )", "cyan")
    return found


def wrapped(text: str) -> str:
    """A text whose long lines are broken at 80 columns and indented."""
    return "\n".join(
        textwrap.fill(line, WIDTH, subsequent_indent="  ", **_WORDS) if len(line) > WIDTH else line
        for line in text.splitlines()
    )


def figures(plan: Plan) -> dict[str, Any]:
    """The plan's choices and predicted figures, for programs; times in seconds, sizes in bytes."""
    found: dict[str, Any] = {
        "name": plan.name,
        "model": plan.model,
        "ranks": plan.world_size,
        "mesh": dict(plan.mesh),
        "zero_stages": dict(plan.zero_stages),
        "recompute": {block: level for block, level in plan.recompute if level != "none"},
        "offload": list(plan.offload),
        "offload_parameters": plan.offload_parameters,
        "loss_chunks": plan.loss_chunks,
        "pipeline": None if plan.pipeline is None else str(plan.pipeline),
        "batch": plan.batch,
        "precision": plan.precision,
        "optimizer": plan.optimizer,
        "parameter_bytes": sum(size for _, size in plan.parameter_bytes),
        "sent_bytes": dict(plan.sent_bytes),
        "memory_cap": plan.memory_cap,
        "cluster": plan.cluster,
        "notes": list(plan.notes),
        "runners_up": [_runner_up(other) for other in plan.runners_up],
        "search": None,
    }
    p = plan.prediction
    if plan.search is not None and p is not None:
        more = {"gap": plan.search.gap(p.step_s), "gain": plan.search.gain(p.step_s)}
        found["search"] = asdict(plan.search) | more
    return found | ({"prediction": None} if p is None else {"prediction": _figures(plan, p)})


def _line(name: str, text: str) -> str:
    """A named line; further lines are indented."""
    head, rest = f"  {name}".ljust(_INDENT), " " * _INDENT
    return textwrap.fill(text, WIDTH, initial_indent=head, subsequent_indent=rest, **_WORDS)


def _predicted(plan: Plan, p: Prediction) -> Iterator[tuple[str, str]]:
    yield "step", _step(plan, p)
    yield "memory", _memory(plan, p)
    yield "bound by", _bound(p)
    faster = [other for other in plan.runners_up if other.step_s >= p.step_s]
    if faster:
        other = min(faster, key=lambda other: other.step_s)
        ratio = other.step_s / p.step_s if p.step_s else 1.0
        slower = f", {ratio - 1:.0%} slower" if ratio >= 1.005 else ", as fast"
        yield "next best", f"{other.name}: {duration(other.step_s)}{slower}"
    if plan.search is not None:
        yield from _searched(plan, plan.search, p.step_s)


def _searched(plan: Plan, found: SearchOutcome, step_s: float) -> Iterator[tuple[str, str]]:
    """Gain over usual layouts; extent and gap of the search."""
    yield "verdict", verdict(plan, found, step_s)
    if others := other_layouts(found):
        yield "practice", practised(others, step_s)
    if not found.looked:
        return
    gap = found.gap(step_s)
    meshes = "1 mesh" if found.looked == 1 else f"{found.looked} meshes"
    bound = f"a better plan saves at most {gap:.1%}" if found.bound_s else "no bound"
    if gap > LOOSE and not found.complete:
        bound = "a better plan may exist: raise --time-limit"
    over = "" if found.complete else "time ran out: "
    yield "searched", f"{over}{meshes}, {found.left_out} left out; {bound}"


def _step(plan: Plan, p: Prediction) -> str:
    """Step time with its interval, throughput, and model FLOPs utilisation."""
    low, high = step_interval(p).of(p.step_s)
    parts = [f"{duration(p.step_s)} predicted ({duration(low)} to {duration(high)})"]
    if p.work is not None and p.step_s:
        done, unit = (p.work.tokens, "tokens") if p.work.tokens else (p.work.rows, "rows")
        parts.append(f"{done / p.step_s:,.0f} {unit}/s")
        if used := p.work.utilisation(p.step_s, plan.world_size):
            parts.append(f"MFU {used:.1%}")
    return ", ".join(parts)


def _memory(plan: Plan, p: Prediction) -> str:
    """Bytes of a rank, and room under the cap."""
    needed = human_bytes(p.needed_bytes)
    if plan.memory_cap is None:
        return f"{needed} a rank; no cap was given"
    room = human_bytes(plan.memory_cap - p.needed_bytes)
    return f"{needed} a rank, {room} free under {human_bytes(plan.memory_cap)}"


def _bound(p: Prediction) -> str:
    parts = parts_of_step(p)
    first = max(parts, key=lambda name: parts[name])
    share = parts[first] / p.step_s if p.step_s else 0.0
    text = f"{first} ({share:.0%} of the step)"
    return f"{text}; waits {duration(p.exposed_s)} for messages" if p.exposed_s else text


def _figures(plan: Plan, p: Prediction) -> dict[str, Any]:
    work = p.work
    return {
        "step_s": p.step_s,
        "step_interval_s": step_interval(p).of(p.step_s),
        "compute_s": p.compute_s,
        "communication_s": p.communication_s,
        "exposed_s": p.exposed_s,
        "update_s": p.update_s,
        "bubble": p.bubble,
        "rows": work.rows if work else None,
        "tokens": work.tokens if work else None,
        "utilisation": work.utilisation(p.step_s, plan.world_size) if work else None,
        "peak_bytes": p.peak_bytes,
        "peak_interval_bytes": memory_interval(p).of(p.peak_bytes),
        "needed_bytes": p.needed_bytes,
        "memory": dict(p.memory),
        "provenance": dict(p.provenance),
    }


def _runner_up(other: RunnerUp) -> dict[str, Any]:
    return {
        "name": other.name,
        "step_s": other.step_s,
        "peak_bytes": other.peak_bytes,
        "why": other.why,
    }
