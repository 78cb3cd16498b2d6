"""`trace`: predicted step of a plan, for ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from autopar.cost_model.simulator.chrome_trace import chrome_trace
from autopar.cost_model.simulator.streams import COMPUTE, Event
from autopar.errors import PlanError
from autopar.plan.prediction import Prediction
from autopar.plan.spec import PlanSpec


def trace(plan: PlanSpec) -> dict[str, Any]:
    """Trace with one process for the predicted rank, or one per pipeline rank.

    Args:
        plan: plan with a prediction.

    Raises:
        PlanError: The plan has no prediction, because the strategy left nothing to choose.
    """
    p = plan.prediction
    if p is None:
        raise PlanError(
            f"the plan {plan.name!r} has no prediction: give a strategy that leaves something "
            "to choose, or a memory cap, and plan again"
        )
    name = f"predicted: {plan.name}"
    if not p.stages:
        blocks = (
            Event(block or "outside of blocks", "blocks", start_s, end_s, phase)
            for block, phase, start_s, end_s in p.report_data.spans
        )
        events = [*blocks, *(Event(*row) for row in p.events)]
        return chrome_trace({name: events}, {name: _memory(p)})
    ranks = {f"rank {rank}": list(_of_rank(p, rank)) for rank in range(len(p.idle))}
    held = "memory of the rank that needs most"
    return chrome_trace({**ranks, held: []}, {held: _memory(p)})


def _of_rank(p: Prediction, rank: int) -> Iterator[Event]:
    """Actions of a pipeline rank, and the messages that it sends."""
    own = f"rank {rank}"
    for name, stream, start_s, end_s, kind in p.events:
        if stream == own:
            yield Event(name, COMPUTE, start_s, end_s, kind)
        elif stream.startswith(f"{own} to "):
            yield Event(name, f"to rank {stream.split()[-1]}", start_s, end_s, kind)


def _memory(p: Prediction) -> Iterator[tuple[float, int | Mapping[str, int]]]:
    """Bytes by category if known, otherwise of all tensors."""
    if not p.report_data.memory:
        yield from p.memory_curve
        return
    names = [name for name, _ in p.report_data.memory]
    columns = zip(*(row for _, row in p.report_data.memory), strict=True)
    for at, column in zip(p.report_data.memory_s, columns, strict=True):
        yield at, dict(zip(names, column, strict=True))
