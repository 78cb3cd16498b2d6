"""`table`: a plan as a text table."""

from __future__ import annotations

import io
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from autopar.core.exposure import CAUSES, Exposure
from autopar.core.ir.mesh_levels import DATA_STORAGE_AXES
from autopar.core.plan.layout import Layout
from autopar.cost_model.memory.allocator import CONTEXT_SOURCE
from autopar.formatting import duration, human_bytes, memory_text, printable
from autopar.report.error_bars import memory_interval, step_interval
from autopar.report.precision import precision_line
from autopar.report.verdict import verdict_lines

if TYPE_CHECKING:
    from autopar.core.plan.plan import Plan
    from autopar.core.plan.prediction import Prediction


WIDTH = 80
"""Columns of a table."""

_TIGHT: Mapping[str, Any] = {"pad_edge": False, "padding": (0, 1, 0, 0)}


def table(plan: Plan) -> str:
    """The plan and its predicted cost as text tables."""
    lines = [*layout(plan), *levels(plan), *predicted(plan), *verdict_lines(plan)]
    lines += exposures(plan.prediction, 5) if plan.prediction else []
    return printable("\n".join([*lines, *(f"note: {note}" for note in plan.notes)]))


def layout(plan: Plan) -> list[str]:
    """Storage and messages of a rank: one row per run of equal blocks, and per stage."""
    sizes = dict(plan.parameter_bytes)
    ranks = "1 rank" if plan.world_size == 1 else f"{plan.world_size} ranks"
    grid = _grid(f"{plan.model} on {ranks}: {plan.name}")
    for column in ("blocks", "ZeRO", "between steps", "parameters", "per rank", "recompute"):
        grid.add_column(column, justify="right" if column in ("parameters", "per rank") else "left")
    for blocks, stage, level in _runs(plan):
        names = [n for n in sizes if _block_of(n, plan) in blocks]
        whole = sum(sizes[n] for n in names)
        held = sum(sizes[n] * Layout(plan).share_of(n) for n in names)
        if not names:
            continue
        kinds = "sharded" if held < whole else "whole"
        span = blocks[0] if len(blocks) == 1 else f"{blocks[0]} .. {blocks[-1]}"
        span = span or "(outside of blocks)"
        grid.add_row(span, str(stage), kinds, human_bytes(whole), human_bytes(held), level)
    mesh = f"mesh {dict(plan.mesh)}, batch {plan.batch}, optimizer {plan.optimizer}"
    lines = [_render(grid), *_stages(plan), mesh, *precision_line(plan), *compressed(plan)]
    if plan.offload:
        lines.append(f"activations of {len(plan.offload)} blocks lie {lower_level(plan)}")
    if plan.offload_parameters:
        lines.append(f"parameters lie {lower_level(plan)} between their uses")
    if plan.loss_chunks > 1:
        lines.append(f"logits and their loss are computed in {plan.loss_chunks} chunks of rows")
    if plan.prediction is not None and (locked := plan.prediction.host_bytes):
        lines.append(f"a rank pins {human_bytes(locked)} of its host's memory")
    if plan.sent_bytes:
        sent = ", ".join(f"{human_bytes(size)} over {axis}" for axis, size in plan.sent_bytes)
        lines.append(f"a rank sends {sent} a step")
    if plan.prediction is not None and plan.prediction.node_bytes:
        lines.append(f"a node sends {human_bytes(plan.prediction.node_bytes)} a step to others")
    return lines


def lower_level(plan: Plan) -> str:
    """The place of what a plan offloads."""
    return f"in {plan.offload_dir}" if plan.offload_dir else "in host memory"


def levels(plan: Plan) -> list[str]:
    """Hierarchical collectives, and replicated shards."""
    found = []
    if plan.hybrid:
        copies = dict(Layout(plan).storage)[DATA_STORAGE_AXES[0]]
        found.append(f"ZeRO shards over {plan.dp_size // copies} neighbours, in {copies} copies")
    for own in plan.levels:
        if kinds := [f"{kind} from {human_bytes(least)}" for kind, least in own.from_bytes]:
            near = f"{own.axis} by level, {own.intra_node} ranks near each other"
            found.append(f"{near}: {', '.join(kinds)}")
    return found


def predicted(plan: Plan) -> list[str]:
    """The predicted cost of a plan."""
    p = plan.prediction
    if p is None:
        return ["predicted: not asked for (nothing was left to choose)"]
    context = ""
    if p.context_bytes:
        context = f"; beside that {human_bytes(p.context_bytes)} of context ({CONTEXT_SOURCE})"
    causes = ", ".join(f"{name} {duration(s)}" for name, s in p.causes.items() if s * 1e3 >= 0.05)
    return [
        *_throughput(plan, p),
        f"predicted step {duration(p.step_s)}: compute {duration(p.compute_s)}, waits for messages "
        f"{duration(p.exposed_s)} of {duration(p.communication_s)}, optimizer "
        f"{duration(p.update_s)}, idle {duration(p.idle_s)}",
        *([f"waits because of: {causes}"] if causes else []),
        f"predicted peak {human_bytes(p.peak_bytes)} of tensors per rank, modelled by liveness: "
        f"{memory_text(p.memory)}",
        f"reserved for them {human_bytes(p.reserved_bytes)}, as torch's allocator does{context}",
        _bars(plan, p),
    ]


def _bars(plan: Plan, p: Prediction) -> str:
    """Prediction intervals of step time and memory."""
    step, memory = step_interval(p), memory_interval(p)
    parts = ["step " + " to ".join(duration(seconds) for seconds in step.of(p.step_s))]
    if p.work is not None and p.step_s:
        rate, unit = (p.work.tokens, "tokens/s") if p.work.tokens else (p.work.rows, "rows/s")
        slow, fast = step.of_rate(rate / p.step_s)
        parts.append(f"{slow:,.0f} to {fast:,.0f} {unit}")
        if used := p.work.utilisation(p.step_s, plan.world_size):
            parts.append("utilisation {:.1%} to {:.1%}".format(*step.of_rate(used)))
    held = " to ".join(human_bytes(nbytes) for nbytes in memory.of(p.peak_bytes))
    return (
        f"error bars: {', '.join(parts)} (nine in ten of {step.source}); peak {held} (nine in ten "
        f"of {memory.source})"
    )


def _throughput(plan: Plan, p: Prediction) -> list[str]:
    """Throughput of all ranks, and their hardware utilisation."""
    if p.work is None or not p.step_s:
        return []
    rows, tokens = p.work.rows / p.step_s, p.work.tokens / p.step_s
    parts = [f"{rows:,.1f} rows/s"] + ([f"{tokens:,.0f} tokens/s"] if tokens else [])
    if used := p.work.utilisation(p.step_s, plan.world_size):
        parts.append(
            f"model FLOPs utilisation {used:.1%} ({p.work.flops:.3g} FLOP a step in matrix "
            f"products and attention, forward and backward, none twice; "
            f"of {p.work.peak / 1e12:,.0f} TFLOP/s {p.work.dtype} a rank)"
        )
    return [", ".join(parts)]


def exposures(p: Prediction, most: int) -> list[str]:
    """The collectives that computation waits for, equal ones in one row, and their causes.

    Args:
        p: prediction of a plan.
        most: maximum number of rows.
    """
    groups = defaultdict[tuple[str, str, int], list[Exposure]](list)
    for item in p.exposures:
        groups[item.collective, item.axis, item.nbytes].append(item)
    if not groups:
        return []
    grid = _grid("Collectives that computation waits for")
    for column in ("collective", "axis", "times", "blocks"):
        grid.add_column(column, justify="right" if column == "times" else "left")
    for column in ("bytes", "waits", "mostly for"):
        grid.add_column(column, justify="left" if column == "mostly for" else "right")
    waits = sorted(groups.items(), key=lambda group: -sum(item.exposed_s for item in group[1]))
    for (collective, axis, nbytes), items in waits[:most]:
        blocks = list(dict.fromkeys(item.block for item in items if item.block))
        span = blocks[0] if len(blocks) == 1 else f"{blocks[0]} .. {blocks[-1]}" if blocks else ""
        wait = duration(sum(item.exposed_s for item in items))
        row = [collective, axis, str(len(items)), span, human_bytes(nbytes), wait]
        grid.add_row(*row, _main_cause(items))
    return [_render(grid)]


def _main_cause(items: Sequence[Exposure]) -> str:
    """The cause of most of the stalls, and its share."""
    seconds = {cause: sum(item.by_cause[cause] for item in items) for cause in CAUSES}
    first, total = max(CAUSES, key=lambda cause: seconds[cause]), sum(seconds.values())
    return f"{first} ({seconds[first] / total:.0%})" if total else first


def compressed(plan: Plan) -> list[str]:
    """One line for local steps, and per kind of compressed message, with its methods."""
    lines = [] if plan.local_steps is None else [str(plan.local_steps)]
    chosen = plan.compressions
    whats = {"gradients": chosen.reduce, "parameters": (*chosen.gather, *chosen.regather)}
    for what, texts in {**whats, "activations": (chosen.activations,)}.items():
        counts = Counter(text or "not" for text in texts)
        if any(texts):
            methods = ", ".join(
                f"{text} ({count} of {len(texts)} buckets)" for text, count in counts.items()
            )
            lines.append(f"{what} are compressed, which is lossy: {methods}")
    return lines


def _stages(plan: Plan) -> list[str]:
    """One row per pipeline stage: memory, times and messages."""
    pipeline = plan.pipeline
    if pipeline is None:
        return []
    grid = _grid(str(pipeline))
    columns = ("stage", "rank", "begins with", "parameters", "forward", "backward")
    for column in (*columns, "sends on", "back", "keeps of each", "in flight"):
        grid.add_column(column, justify="left" if column == "begins with" else "right")
    sizes, owners = dict(plan.parameter_bytes), pipeline.owners
    predicted = plan.prediction.stages if plan.prediction else ()
    for stage in range(pipeline.stages):
        names = [name for name, owner in owners.items() if owner == stage]
        held = human_bytes(sum(sizes[name] for name in names))
        row = [str(stage), str(pipeline.rank_of(stage)), names[0] if names else "", held]
        if predicted:
            p = predicted[stage]
            row += [duration(s) for s in (p.forward_s, p.backward_s)]
            row += [human_bytes(n) for n in (p.sent_bytes, p.returned_bytes, p.saved_bytes)]
            row.append(str(p.in_flight))
        grid.add_row(*row)
    return [_render(grid)]


def _runs(plan: Plan) -> Iterator[tuple[list[str], int, str]]:
    """Consecutive blocks with the same ZeRO stage and checkpointing."""
    levels = dict(plan.recompute)
    rows = ((block, stage, levels.get(block, "none")) for block, stage in plan.zero_stages)
    for (_, stage, level), run in groupby(rows, key=lambda row: (not row[0], *row[1:])):
        yield [block for block, *_ in run], stage, level


def _block_of(name: str, plan: Plan) -> str:
    blocks = [block for block, _ in plan.zero_stages if block and name.startswith(block + ".")]
    return max(blocks, key=len, default="")


def _grid(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, **_TIGHT)


def _render(grid: Table) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=WIDTH, color_system=None, markup=False, emoji=False)
    console.print(grid)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())
