"""Data parallelism on unequal ranks: rows by speed, against every other division."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

import autopar
from autopar.core.ir.placement import proportional_rows
from benchmarks.models import GPT
from benchmarks.unequal.steps import medians, step, turn

VOCABULARY, WIDTH, TOKENS, LAYERS = 256, 128, 64, 4


def race(rows: int, rounds: int) -> dict[str, Any]:
    """Train under all divisions, a few steps of each in turn; return the figures."""
    torch.manual_seed(0)
    ids = torch.randint(VOCABULARY, (rows, TOKENS))
    net = GPT(LAYERS, VOCABULARY, tied=False, width=WIDTH, heads=4)
    strategy = autopar.Strategy(zero=0, balance="measured")
    model = autopar.compile(net, strategy=strategy, example_inputs=(ids, ids))
    optimizer = torch.optim.AdamW(model.parameters())
    measured = proportional_rows(rows, model.row_shares or (1.0, 1.0))[0]
    for _ in range(10):
        step(model, optimizer, ids)
    seen = proportional_rows(rows, model.rebalance())[0]

    def divided(first: int) -> list[float]:
        model.divide_rows((float(first), float(rows - first)))
        return turn(model, optimizer, ids)

    times = medians({first: partial(divided, first) for first in range(1, rows)}, rounds)
    best = min(times, key=times.__getitem__)
    named = {"even": rows // 2, "measured": measured, "rebalanced": seen, "best": best}
    result: dict[str, Any] = {"rows": rows, "rows_of_rank_0": named}
    result["step_ms"] = {name: round(1e3 * times[n], 2) for name, n in named.items()}
    result["over_best"] = {name: round(times[n] / times[best], 3) for name, n in named.items()}
    result["all_ms"] = {str(n): round(1e3 * value, 2) for n, value in times.items()}
    return result
