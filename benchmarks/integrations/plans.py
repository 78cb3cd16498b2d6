"""`run_plans`: one loop under several plans, on every rank."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from autopar.core.plan.strategy import Strategy
from benchmarks.integrations.record import Record
from benchmarks.memoize import memoized_capture


def run_plans(
    rank: int,
    ranks: int,
    part: str,
    folder: str,
    steps: int,
    plans: Mapping[str, Strategy],
) -> dict[str, Record]:
    """Runs a loop under each plan; each run is resumed under the plan after it.

    Args:
        part: module of this package with the loop.
        folder: folder of checkpoints, the same on every rank.
    """
    loop: Any = importlib.import_module(f"benchmarks.integrations.{part}")
    names = list(plans)
    following = dict(zip(names, names[1:] + names[:1], strict=True))
    records = {}
    with memoized_capture():
        for name, plan in plans.items():
            resume = {"strategy": plans[following[name]]}
            records[name] = loop.run(rank, ranks, f"{folder}/{name}", steps, resume, strategy=plan)
    return records


def run_plain(part: str, folder: str, steps: int) -> Record:
    """Runs a loop of the library on this process alone."""
    loop: Any = importlib.import_module(f"benchmarks.integrations.{part}")
    return loop.run(0, 1, folder, steps)
