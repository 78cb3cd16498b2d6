"""`check_account`: the parts of a predicted step and its memory add up, for every plan."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.core.plan.layout import Layout
from autopar.core.plan.plan import Plan
from autopar.core.plan.prediction import Prediction
from autopar.errors import PlanError
from autopar.formatting import duration, human_bytes

ROUNDING = 0.01
"""Fraction by which a sum may differ: blocks that few stand for count in proportion."""


def check_account(plan: Plan, cost: Prediction) -> None:
    """Checks a prediction against what must hold of every plan.

    Raises:
        PlanError: parts of a step exceed it, or a rank holds less than its shards.
    """
    if faults := [*_faults(plan, cost)]:
        raise PlanError(
            f"the prediction of {plan.name} does not add up: {'; '.join(faults)}. This is a fault "
            "of autopar: please report it with the model and the strategy."
        )


def _faults(plan: Plan, cost: Prediction) -> Iterator[str]:
    parts_s = cost.compute_s + cost.exposed_s + cost.update_s
    if parts_s > (1.0 + ROUNDING) * cost.step_s:
        yield f"its parts take {duration(parts_s)}, and the step {duration(cost.step_s)}"
    held, least = cost.memory.get("parameters", 0), _least_bytes(plan)
    if cost.memory and held < (1.0 - ROUNDING) * least:
        yield f"a rank counts {human_bytes(held)} of parameters, and holds {human_bytes(least)}"


def _least_bytes(plan: Plan) -> float:
    """Bytes of the parameters on the rank that holds the fewest; 0 if they lie elsewhere."""
    if plan.offload_parameters:
        return 0.0
    layout, pipeline = Layout(plan), plan.pipeline
    sizes = {name: size * layout.share_of(name) for name, size in plan.parameter_bytes}
    if pipeline is None or plan.pp_size == 1:
        return sum(sizes.values())
    held = map(pipeline.held, range(pipeline.ranks))
    return min(sum(sizes[name] for name in own) for own in held)
