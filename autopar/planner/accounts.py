"""`account_notes`: whether parts of a predicted step and its memory add up, for every plan."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.core.plan.layout import Layout
from autopar.core.plan.plan import Plan
from autopar.core.plan.prediction import Prediction
from autopar.formatting import duration, human_bytes

ROUNDING = 0.01
"""Fraction by which a sum may differ: blocks that few stand for count in proportion."""


def account_notes(plan: Plan, cost: Prediction) -> Iterator[str]:
    """A note for each thing that must hold of every plan, and does not hold of a prediction.

    Parts of a step exceed it, or a rank holds less than its shards.
    """
    for fault in _faults(plan, cost):
        yield f"the prediction does not add up: {fault}. This is a fault of autopar: report it"


def _faults(plan: Plan, cost: Prediction) -> Iterator[str]:
    parts_s = cost.compute_s + cost.exposed_s + cost.update_s
    if parts_s > (1.0 + ROUNDING) * cost.step_s:
        yield f"its parts take {duration(parts_s)}, and the step {duration(cost.step_s)}"
    held, least = cost.memory.get("parameters", 0), _least_bytes(plan)
    if cost.memory and held < (1.0 - ROUNDING) * least:
        yield f"a rank counts {human_bytes(held)} of parameters, and holds {human_bytes(least)}"


def _least_bytes(plan: Plan) -> float:
    """Bytes of the parameters on the rank that holds the fewest; 0 if they lie elsewhere.

    Those that forward changes count as buffers.
    """
    if plan.offload_parameters:
        return 0.0
    layout, pipeline = Layout(plan), plan.pipeline
    kept = (item for item in plan.parameter_bytes if item[0] not in plan.changed)
    sizes = {name: size * layout.share_of(name) for name, size in kept}
    if pipeline is None or plan.pp_size == 1:
        return sum(sizes.values())
    held = map(pipeline.held, range(pipeline.ranks))
    return min(sum(sizes.get(name, 0.0) for name in own) for own in held)
