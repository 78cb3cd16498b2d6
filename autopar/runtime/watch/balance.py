"""`why_not_balanced`: plans whose rows cannot be divided by the speed of ranks."""

from __future__ import annotations

from autopar.core.plan.plan import Plan
from autopar.errors import StrategyError


def why_not_balanced(plan: Plan) -> StrategyError | None:
    """The error that rows under a plan cannot be divided by speed, None if they can."""
    obstacles = {
        "stages or shards of the model (pp, tp, cp, ep)": plan.dp_size < plan.world_size,
        "micro-batches, which are equal": plan.pipeline is not None,
        "batch='local', where each rank brings its rows": plan.batch == "local",
        "local batch_semantics": plan.batch_semantics == "local",
    }
    stuck = next((text for text, holds in obstacles.items() if holds), None)
    if stuck is None:
        return None
    return StrategyError(
        f"rows cannot be divided by speed under {stuck}: use ddp or ZeRO with batch='global', or "
        "leave balance='measured' and rebalance() out"
    )
