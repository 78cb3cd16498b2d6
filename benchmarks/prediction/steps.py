"""Part `steps`: predicted against measured step times, of the models that the parity tests train.

`tests/harness/models.py` at eight times its sizes (WIDTH 256, SEQ 96; 1 to 5 million parameters;
steps of 50 to 500 ms), under every ZeRO stage and partitioned over all ranks, with and without
recomputation, on 2 and 4 processes, on one host and on the emulated cluster. In each setting the
ranks live for all plans of a model. They measure collectives and operators, as `autopar.compile`
does, predict, and then train all plans in turn; all this several times over, for the machine
drifts. Nothing is fitted to measured steps. Denormal numbers are flushed: time that depends on
values is not predicted. Each case says what part of the cores other processes took meanwhile
(`others`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from scipy.stats import spearmanr

from benchmarks.cluster import Network, Unavailable, launch
from benchmarks.prediction.settings import ROOT, Setting

SCALE = 8
ROWS = {"gpt": 16, "dropout": 16, "encoder": 16, "conv": 64, "encdec": 8, "moe": 8, "odd": 64}
"""Rows of the global batch of each model."""

SETTINGS = (Setting(1, 2), Setting(1, 4), Setting(2, 1, "1gbit"), Setting(2, 2, "1gbit"))
CYCLES, STEPS = 6, 2
"""How often everything is measured again, and steps of each plan each time."""


def run(options: Any) -> dict[str, Any]:
    """Errors of all plans together, of each setting and of each model.

    Options: `quick` takes two models and one cycle; `models` and `settings` name a selection.
    """
    quick = getattr(options, "quick", False)
    models = getattr(options, "models", None) or (("gpt", "conv") if quick else tuple(ROWS))
    chosen = getattr(options, "settings", None)
    cases: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    for setting in SETTINGS:
        if chosen and str(setting) not in chosen:
            continue
        for model in models:
            try:
                cases += outcome(setting, model, 1 if quick else CYCLES)
            except Unavailable as reason:
                skipped[str(setting)] = str(reason)
    orders = order_of_plans(cases)
    return {
        **summary(cases),
        "worst_order": min(orders.values(), default=None),
        "others": median(case["others"] for case in cases) if cases else None,
        "settings": {str(s): summary(_of(cases, "setting", str(s))) for s in SETTINGS},
        "models": {m: summary(_of(cases, "model", m)) for m in models},
        "orders": orders,
        "skipped": skipped,
        "cases": cases,
    }


def outcome(setting: Setting, model: str, cycles: int = CYCLES) -> list[dict[str, Any]]:
    """The cases of one model in one setting: one for each plan."""
    with tempfile.TemporaryDirectory(prefix="autopar-steps-") as folder:
        result = Path(folder, "cases.json")
        arguments = [str(result), model, str(ROWS[model]), str(cycles), str(STEPS)]
        environment = {"AUTOPAR_TEST_SCALE": str(SCALE)}
        _launch(setting, ["-m", "benchmarks.prediction.steps_rank", *arguments], environment)
        plans: list[dict[str, Any]] = json.loads(result.read_text())
    return [{"setting": str(setting), "model": model, **plan} for plan in plans]


def _launch(setting: Setting, arguments: Sequence[str], environment: dict[str, str]) -> None:
    if setting.rate is not None:
        with Network(setting.nodes, setting.rate) as network:
            command = [sys.executable, *arguments]
            launch(network, command, setting.ranks_per_node, environment=environment)
        return
    threads = max(1, (os.cpu_count() or 1) // setting.world_size)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    subprocess.run(
        [*command, str(setting.world_size), *arguments],
        cwd=ROOT,
        env={"OMP_NUM_THREADS": str(threads), **os.environ, **environment},
        check=True,
    )


def summary(cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The median and the worst error of some cases, None of none."""
    errors = [case["error"] for case in cases]
    return {
        "median_error": median(errors) if errors else None,
        "worst_error": max(errors, default=None),
        "number": len(errors),
    }


def order_of_plans(cases: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Spearman's rank correlation between predicted and measured times of one model's plans."""
    found = {}
    for setting, model in sorted({(case["setting"], case["model"]) for case in cases}):
        plans = [c for c in cases if (c["setting"], c["model"]) == (setting, model)]
        columns = [[plan[key] for plan in plans] for key in ("predicted", "measured")]
        found[f"{setting}, {model}"] = float(spearmanr(*columns).statistic)
    return found


def _of(cases: Sequence[dict[str, Any]], key: str, value: str) -> list[dict[str, Any]]:
    return [case for case in cases if case[key] == value]
