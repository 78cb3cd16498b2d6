"""Whether models divided over real processes train as the plain ones do on one.

    python -m benchmarks.exactness --json FILE
    python -m benchmarks.exactness --setups pp2-1f1b-4,pp2xtp2xdp2 --models gpt,llama

The parity models and sixteen architectures of transformers, small, ten steps each: every loss and
the final state of every rank beside those of the plain model. Exact are 1e-9 relative in float64
under AdamW, and 1e-5 in float32 under SGD with momentum. The exit status is 1 if one is not.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

import autopar
from autopar.ir.placement import Shard
from autopar.plan.pipeline import SCHEDULES
from benchmarks.report import machine, versions
from tests.harness.architectures import ARCHITECTURES
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

    Attributes:
        ranks: on how many.
        options: what of the strategy is fixed.
        rows: of each batch. So few, and odd, that something else than rows is divided, and uneven
            over data-parallel ranks; under a pipeline its micro-batches must divide them.
    """

    ranks: int
    options: Mapping[str, Any]
    rows: int = 5

    @property
    def is_divided(self) -> bool:
        """Whether ranks draw random numbers of their own: for their rows, or for their stages."""
        return self.ranks > self.options.get("tp", 1)

    def suits(self, model: str) -> bool:
        """Whether a model can train exactly so."""
        batch_norm = model in ("conv", "resnet") and self.options.get("micro_batches", 1) > 1
        return not batch_norm and not (model == "dropout" and self.is_divided)


def piped(
    pp: int,
    schedule: str = "1f1b",
    micro_batches: int = 4,
    ranks: int | None = None,
    **options: Any,
) -> Setup:
    """A setup of a pipeline."""
    fixed = {"pp": pp, "schedule": schedule, "micro_batches": micro_batches, **options}
    return Setup(ranks or pp, fixed, rows=16)


PIPELINES = {
    f"pp{pp}-{schedule}-{micro_batches}": piped(pp, schedule, micro_batches)
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
    "pp2xdp2": piped(2, ranks=4),
    "pp2xdp2-zero3": piped(2, ranks=4, zero=3),
    "pp2xtp2": piped(2, ranks=4, tp=2),
    "pp2xtp2xdp2": piped(2, ranks=8, tp=2, zero=2),
    "pp2xtp2xdp2-whole": piped(2, micro_batches=1, ranks=8, tp=2, zero=3),
}
"""What is swept if nothing else is asked for: partitions, and pipelines of them."""

OPEN = {"gather_bytes": None, "reduce_bytes": None, "prefetch": None}
"""Left to the planner, which then schedules every collective."""

COMMUNICATION = {
    **{f"zero{z}-{n}": Setup(n, {"zero": z, **OPEN}) for z in range(4) for n in (2, 3, 4)},
    **{f"zero{z}-levels": Setup(4, {"zero": z, "hierarchical": 2, **OPEN}) for z in range(4)},
    **{f"zero{z}-hybrid": Setup(4, {"zero": z, "dp_shard": 2, **OPEN}) for z in (1, 2, 3)},
}
"""Every ZeRO stage with collectives scheduled, by level, and sharded over neighbours only."""

SETUPS = COMPOSED | PIPELINES | COMMUNICATION

CASES: Mapping[str, Case] = MODELS | {name: it.case for name, it in ARCHITECTURES.items()}


@dataclass(frozen=True)
class Row:
    """How one model trained in one setup.

    Attributes:
        model: its name.
        setup: its name.
        loss_error: the worst relative difference of a loss, on any rank.
        parameter_error: that of a tensor of the final state.
        of: which tensor that is.
        sharded_parameters: how many parameters lie in shards along tp.
        parameters: how many there are.
        seconds: from the model to the end of its training, planning included.
        error: what kept it from training.
    """

    model: str
    setup: str
    loss_error: float | None = None
    parameter_error: float | None = None
    of: str | None = None
    sharded_parameters: int | None = None
    parameters: int | None = None
    seconds: float | None = None
    error: str | None = None

    def is_exact(self, tolerance: float) -> bool:
        """Whether it trained, and neither error exceeds the tolerance."""
        errors = (self.loss_error, self.parameter_error)
        return all(error is not None and error <= tolerance for error in errors)


def measure(name: str, setup: str, dtype: torch.dtype = torch.float64, steps: int = STEPS) -> Row:
    """Trains one model in one setup on processes that stay alive for the next."""
    given = {"name": name, "setup": SETUPS[setup], "dtype": dtype, "steps": steps}
    try:
        answers = run(trained, SETUPS[setup].ranks, timeout=600, **given)
    except RankError as error:
        return Row(name, setup, error=_first_line(error))
    want = plain(name, dtype, steps, SETUPS[setup].rows)
    losses, states = [], []
    for got, _, _ in answers:
        losses.append(worst_loss(got, want))
        states.append(worst_error(got.state, want.state))
    state, of = max(states)
    _, sharded, seconds = answers[0]
    return Row(name, setup, max(losses), state, of, *sharded, seconds)


def _first_line(error: RankError) -> str:
    """What the first rank raised; graphs that passes print with it would fill pages."""
    trace = next(iter(error.errors.values()))
    raised = [line for line in trace.splitlines() if line[:1].isalpha() and "Error" in line]
    return raised[0][:400] if raised else "a rank failed"


def trained(
    rank: int,
    world_size: int,
    name: str,
    setup: Setup,
    dtype: torch.dtype,
    steps: int,
) -> tuple[Reference, tuple[int, int], float]:
    """One rank's training; how many parameters lie in shards, and how many there are; seconds."""
    warnings.simplefilter("ignore")
    start, case = time.perf_counter(), CASES[name]
    model = autopar.compile(case.make().to(dtype), strategy=fixed(**setup.options), fallback=False)
    optimizer = optimizer_of(dtype)(model.parameters())
    losses = train_steps(model, optimizer, case, batches(case, range(steps), setup.rows, dtype))
    found = Reference(losses, whole_state(model))
    return found, sharded_of(model), time.perf_counter() - start


def sharded_of(model: nn.Module) -> tuple[int, int]:
    """How many parameters lie in shards along tp, and how many a rank has to do with."""
    names = [name for name, _ in model.named_parameters()]
    sharded = [name for name in names if isinstance(model.plan.layout(name).get("tp"), Shard)]
    return len(sharded), len(names)


@functools.cache
def plain(name: str, dtype: torch.dtype, steps: int, rows: int) -> Reference:
    """The plain model's training, from the seed that ranks start with."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        return reference(CASES[name], steps, dtype, optimizer_of(dtype), rows)


def sweep(
    models: Sequence[str], setups: Sequence[str], dtype: torch.dtype, console: Console
) -> Iterator[Row]:
    """Every model in every setup."""
    for setup in setups:
        for name in models:
            if not SETUPS[setup].suits(name):
                continue
            row = measure(name, setup, dtype)
            console.print(f"{setup} {name}: {row.error or row.parameter_error}", markup=False)
            yield row


def table(rows: Sequence[Row], tolerance: float) -> Table:
    """A line for each row, red where it is not exact."""
    drawn = Table(box=box.SIMPLE_HEAD, title=f"exact: {tolerance:g}")
    for heading in ("model", "setup", "loss", "parameters", "worst of", "sharded", "seconds"):
        drawn.add_column(heading, justify="left" if heading in ("model", "setup") else "right")
    for row in rows:
        cells = (row.loss_error, row.parameter_error)
        drawn.add_row(
            row.model,
            row.setup,
            *("-" if error is None else f"{error:.1e}" for error in cells),
            row.of or "-",
            f"{row.sharded_parameters} of {row.parameters}",
            f"{row.seconds or 0:.1f}",
            style=None if row.is_exact(tolerance) else "red",
        )
    return drawn


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exactness", description=__doc__)

    def some(known: Iterable[str]) -> Any:
        return {"type": lambda text: text.split(","), "default": list(known), "metavar": "A,B"}

    parser.add_argument("--models", help=f"of {', '.join(CASES)}", **some(CASES))
    parser.add_argument("--setups", help=f"of {', '.join(SETUPS)}", **some(COMPOSED))
    parser.add_argument("--dtype", choices=DTYPES, default="float64")
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args(arguments)
    for given, known in ((options.models, CASES), (options.setups, SETUPS)):
        unknown = ", ".join(sorted(set(given) - set(known)))
        if unknown:
            parser.error(f"there is no {unknown}; choose from {', '.join(known)}")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Runs the sweep, shows a table, writes the rows as they come if asked to."""
    options, console = parse_arguments(arguments), Console()
    torch.set_num_threads(1)
    dtype = DTYPES[options.dtype]
    about = {
        "machine": machine(),
        "versions": versions(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "dtype": options.dtype,
        "tolerance": EXACT[dtype],
    }
    rows: list[Row] = []
    for row in sweep(options.models, options.setups, dtype, console):
        rows.append(row)
        if options.json:
            document = {**about, "rows": [asdict(row) for row in rows]}
            options.json.write_text(json.dumps(document, indent=1) + "\n")
    console.print(table(rows, EXACT[dtype]))
    return 0 if all(row.is_exact(EXACT[dtype]) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
