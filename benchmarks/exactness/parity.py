"""Parity of models divided over real processes with the plain models on one.

    python -m benchmarks.exactness --setups pp2-1f1b-4,pp2xtp2xdp2 --models gpt,llama

Every loss of ten steps and the final state of every rank are compared with the plain model's: to
1e-9 relative in float64 under AdamW, to 1e-5 in float32 under SGD with momentum.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

import autopar
from autopar.core.ir.placement import Shard
from autopar.core.plan.layout import Layout
from autopar.core.plan.pipeline import SCHEDULES
from benchmarks.report import about, empty_table, save, wide_console
from tests.harness.architectures import ARCHITECTURES
from tests.harness.architectures import EXPERTS as MIXTURES
from tests.harness.models import MODELS, Case
from tests.harness.reference import (
    Reference,
    batches,
    reference,
    train_steps,
    worst_error,
    worst_loss,
)
from tests.harness.training import EXACT, STEPS, fixed, optimizer_of, whole_state
from tests.harness.worlds import RankError, run

DTYPES = {"float64": torch.float64, "float32": torch.float32}


@dataclass(frozen=True)
class Setup:
    """One way to train a model.

    Rows of a batch are few and odd, so that other dims are divided and rows are uneven over
    data-parallel ranks. Micro-batches of a pipeline must divide them.
    """

    ranks: int
    options: Mapping[str, Any]  # fixed fields of the strategy
    rows: int = 5

    def suits(self, model: str) -> bool:
        """Whether a model can train exactly in this setup."""
        if "ep" in self.options:
            return model in MIXTURES
        if model == "dropout":  # ranks draw other random numbers for their rows or stages
            return self.ranks == self.options.get("tp", 1)
        return model not in ("conv", "resnet") or self.options.get("micro_batches", 1) == 1


def pipelined(ranks: int, pp: int, **options: Any) -> Setup:
    return Setup(ranks, {"pp": pp, "schedule": "1f1b", "micro_batches": 4, **options}, rows=16)


PIPELINES = {
    f"pp{pp}-{schedule}-{micro_batches}": pipelined(
        pp, pp, schedule=schedule, micro_batches=micro_batches
    )
    for pp in (2, 3, 4)
    for schedule in SCHEDULES
    for micro_batches in (1, 2, 4, 8)
}
"""Every schedule at every number of stages and of micro-batches."""

COMPOSED = {
    "tp2": Setup(2, {"tp": 2}),
    "tp3": Setup(3, {"tp": 3}),
    "tp4": Setup(4, {"tp": 4}),
    "tp2xdp2": Setup(4, {"tp": 2, "zero": 3}),
    "pp2xdp2": pipelined(4, 2),
    "pp2xdp2-zero3": pipelined(4, 2, zero=3),
    "pp2xtp2": pipelined(4, 2, tp=2),
    "pp2xtp2xdp2": pipelined(8, 2, tp=2, zero=2),
    "pp2xtp2xdp2-whole": pipelined(8, 2, micro_batches=1, tp=2, zero=3),
}
"""The default sweep: partitions, and pipelines of them."""

OPEN = {"gather_bytes": None, "reduce_bytes": None, "prefetch": None}
"""Options left to the planner, which then schedules every collective."""

COMMUNICATION = {
    **{f"zero{z}-{n}": Setup(n, {"zero": z, **OPEN}) for z in range(4) for n in (2, 3, 4)},
    **{f"zero{z}-levels": Setup(4, {"zero": z, "hierarchical": 2, **OPEN}) for z in range(4)},
    **{f"zero{z}-hybrid": Setup(4, {"zero": z, "dp_shard": 2, **OPEN}) for z in (1, 2, 3)},
}
"""Every ZeRO stage with collectives scheduled, by level, and sharded over neighbours only."""

LONG_ROWS = {
    "cp2": Setup(2, {"cp": 2}),
    "cp2-ring": Setup(2, {"cp": 2, "ring_attention": True}),
    "cp4-ring-zero3": Setup(4, {"cp": 4, "ring_attention": True, "zero": 3}),
    "cp2xdp2-zero3": Setup(4, {"cp": 2, "zero": 3}, rows=4),
    "chunks3-zero3": Setup(2, {"zero": 3, "loss_chunks": 3}),
    "chunks3-tp2": Setup(2, {"tp": 2, "loss_chunks": 3}),
    "chunks3-cp2": Setup(2, {"cp": 2, "loss_chunks": 3}),
    "chunks3-cp2xdp2-zero3": Setup(4, {"cp": 2, "zero": 3, "loss_chunks": 3}, rows=4),
}
"""Rows divided along cp, rings of attention, and losses in chunks."""

ROUTED = {
    "placements": {"*.experts.*": {"ep": Shard(0)}},
    "keep_sharded": True,
    "route_experts": True,
}
"""Options under which tokens are sent to the ranks of their experts."""

EXPERTS = {
    "ep2": Setup(2, {"ep": 2, **ROUTED}, rows=4),
    "ep4": Setup(4, {"ep": 4, **ROUTED}, rows=8),
    "ep4-nodes": Setup(4, {"ep": 4, "hierarchical": 2, **ROUTED}, rows=8),
    "ep2xtp2": Setup(4, {"ep": 2, "tp": 2, **ROUTED}, rows=8),
    "ep2xdp2-zero3": Setup(4, {"ep": 2, "zero": 3, **ROUTED}, rows=8),
    "ep4-zero3": Setup(4, {"ep": 4, "zero": 3, **ROUTED}, rows=8),
}
"""Mixtures of experts whose tokens are sent: along ep, by node, with tp, and with ZeRO."""

SETUPS = COMPOSED | PIPELINES | COMMUNICATION | LONG_ROWS | EXPERTS

CASES: Mapping[str, Case] = MODELS | {
    name: it.case for name, it in (MIXTURES | ARCHITECTURES).items()
}


@dataclass(frozen=True)
class Row:
    model: str
    setup: str
    loss_error: float | None = None  # worst relative difference of a loss, on any rank
    parameter_error: float | None = None  # worst relative difference of a tensor of the state
    tensor: str | None = None  # name of that tensor
    sharded_parameters: int | None = None  # number of parameters sharded along tp
    parameters: int | None = None
    seconds: float | None = None  # from the model to the end of its training, planning included
    error: str | None = None  # first line of an exception

    def is_exact(self, tolerance: float) -> bool:
        """Whether it trained and both errors are within the tolerance."""
        errors = (self.loss_error, self.parameter_error)
        return all(error is not None and error <= tolerance for error in errors)


def measure(name: str, setup: str, dtype: torch.dtype = torch.float64, steps: int = STEPS) -> Row:
    """Train one model in one setup on processes that later setups reuse."""
    options = {"name": name, "setup": SETUPS[setup], "dtype": dtype, "steps": steps}
    try:
        answers = run(train_on_rank, SETUPS[setup].ranks, timeout=600, **options)
    except RankError as error:
        trace = next(iter(error.errors.values()))  # without graphs that passes print with it
        raised = [line for line in trace.splitlines() if line[:1].isalpha() and "Error" in line]
        return Row(name, setup, error=raised[0][:400] if raised else "a rank failed")
    want = train_plain(name, dtype, steps, SETUPS[setup].rows)
    loss = max(worst_loss(got, want) for got, _, _ in answers)
    state, tensor = max(worst_error(got.state, want.state) for got, _, _ in answers)
    _, sharded, seconds = answers[0]
    return Row(name, setup, loss, state, tensor, *sharded, seconds)


def train_on_rank(
    rank: int,
    world_size: int,
    name: str,
    setup: Setup,
    dtype: torch.dtype,
    steps: int,
) -> tuple[Reference, tuple[int, int], float]:
    """Train on one rank; return the result, numbers of sharded and of all parameters, seconds."""
    warnings.simplefilter("ignore")
    start, case = time.perf_counter(), CASES[name]
    model = autopar.compile(case.make().to(dtype), strategy=fixed(**setup.options), fallback=False)
    optimizer = optimizer_of(dtype)(model.parameters())
    losses = train_steps(model, optimizer, case, batches(case, range(steps), setup.rows, dtype))
    found = Reference(losses, whole_state(model))
    names = [name for name, _ in model.named_parameters()]
    sharded = sum(isinstance(Layout(model.plan).of(name).get("tp"), Shard) for name in names)
    return found, (sharded, len(names)), time.perf_counter() - start


@functools.cache
def train_plain(name: str, dtype: torch.dtype, steps: int, rows: int) -> Reference:
    """Train the plain model from the seed of the ranks."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        return reference(CASES[name], steps, dtype, optimizer_of(dtype), rows)


def table(rows: Sequence[Row], tolerance: float) -> Table:
    headings = ("setup", "loss", "parameters", "worst tensor", "sharded", "seconds")
    drawn = empty_table(f"exact: {tolerance:g}", "model", headings)
    for row in rows:
        cells = (row.loss_error, row.parameter_error)
        drawn.add_row(
            row.model,
            row.setup,
            *("-" if error is None else f"{error:.1e}" for error in cells),
            row.tensor or "-",
            f"{row.sharded_parameters} of {row.parameters}",
            f"{row.seconds or 0:.1f}",
            style=None if row.is_exact(tolerance) else "red",
        )
    return drawn


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exactness", description=__doc__)

    def some(known: Iterable[str]) -> Any:
        return {"type": lambda text: text.split(","), "default": list(known), "metavar": "A,B"}

    parser.add_argument("--models", help=f"of {', '.join(CASES)}", **some(CASES))
    parser.add_argument("--setups", help=f"of {', '.join(SETUPS)}", **some(COMPOSED))
    parser.add_argument("--dtype", choices=DTYPES, default="float64")
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args(arguments)
    for names, known in ((options.models, CASES), (options.setups, SETUPS)):
        unknown = ", ".join(sorted(set(names) - set(known)))
        if unknown:
            parser.error(f"there is no {unknown}; choose from {', '.join(known)}")
    return options


def main(arguments: list[str] | None = None) -> int:
    options, console = parse_arguments(arguments), wide_console()
    torch.set_num_threads(1)
    dtype = DTYPES[options.dtype]
    facts = {**about(), "dtype": options.dtype, "tolerance": EXACT[dtype]}
    rows: list[Row] = []
    for setup, name in itertools.product(options.setups, options.models):
        if not SETUPS[setup].suits(name):
            continue
        rows.append(row := measure(name, setup, dtype))
        console.print(f"{setup} {name}: {row.error or row.parameter_error}", markup=False)
        if options.json:
            save(options.json, {**facts, "rows": [asdict(row) for row in rows]})
    console.print(table(rows, EXACT[dtype]))
    return 0 if all(row.is_exact(EXACT[dtype]) for row in rows) else 1
