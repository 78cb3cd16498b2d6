"""Two pipeline stages on unequal ranks: blocks by speed, against every other cut."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

import autopar
from benchmarks.models import GPT
from benchmarks.unequal.steps import medians, turn

VOCABULARY, WIDTH, TOKENS, LAYERS = 256, 128, 64, 8
MICRO_BATCHES = 4


def contenders(net: dict[str, Any], inputs: tuple[torch.Tensor, ...]) -> dict[str, Any]:
    """Models with each cut between blocks, with equal stages, and with stages by speed."""

    def model(**more: Any) -> Any:
        torch.manual_seed(0)
        strategy = autopar.Strategy(pp=2, micro_batches=MICRO_BATCHES, schedule="1f1b", **more)
        return autopar.compile(GPT(**net), strategy=strategy, example_inputs=inputs)

    cuts = {
        f"{first} blocks": model(split_points=(f"blocks.{first}",)) for first in range(1, LAYERS)
    }
    return {"even": model(), "measured": model(balance="measured"), **cuts}


def race(rows: int, rounds: int) -> dict[str, Any]:
    """Train all contenders, a few steps of each in turn; return the figures."""
    torch.manual_seed(0)
    ids = torch.randint(VOCABULARY, (rows, TOKENS))
    net = {"layers": LAYERS, "vocabulary": VOCABULARY, "tied": False, "width": WIDTH, "heads": 4}
    models = contenders(net, (ids, ids))
    turns = {
        name: partial(turn, model, torch.optim.AdamW(model.parameters()), ids)
        for name, model in models.items()
    }
    times = medians(turns, rounds)
    best = min(times, key=times.__getitem__)
    return {
        "rows": rows,
        "cuts": {name: models[name].plan.pipeline.starts[0] for name in ("even", "measured")},
        "best": best,
        "over_best": {name: round(own / times[best], 3) for name, own in times.items()},
        "all_ms": {name: round(1e3 * own, 2) for name, own in times.items()},
    }
