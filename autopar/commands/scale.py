"""`autopar scale`: predicted throughput by number of GPUs, for each strategy."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table

from autopar.api import plan as make_plan
from autopar.commands.help_text import JSON, add_command, print_json
from autopar.commands.option_types import limit_s, ranks
from autopar.commands.plain_console import PlainConsole
from autopar.commands.script import MAKE, load
from autopar.cost_model.cluster.cluster import Cluster
from autopar.errors import AutoparError, OutOfMemoryError, StrategyError
from autopar.formatting import human_bytes
from autopar.plan.strategy import SEARCHED, ZERO_OF_NAME, Strategy
from autopar.report.error_bars import STEPS
from autopar.report.plan import Plan

DEFAULT = ("ddp", "zero1", "zero3", "tp8+zero1")
_FIELDS = {"tp": "tp", "cp": "cp", "ep": "ep", "pp": "pp", "m": "micro_batches"}


@dataclass(frozen=True)
class Cell:
    """A strategy on a number of GPUs.

    Attributes:
        gpus: number of GPUs.
        rate: tokens per second of all GPUs, or rows without tokens; 0 if it does not run.
        used: model FLOPs utilisation; 0 if unknown.
        why: reason why it does not run.
    """

    gpus: int
    rate: float
    used: float
    why: str = ""


def add_to(commands: Any) -> None:
    """Adds the command to the parser's subcommands."""
    parser = add_command(
        commands,
        "scale",
        "predict throughput and efficiency by number of GPUs, for each strategy",
        "autopar scale gpt.py --cluster dgx-h100 --gpus 8,64 --strategies ddp,zero3",
        "The global batch of make() is the same in every cell.",
        usage="autopar scale SCRIPT --cluster NAME --gpus 8,64,512 [OPTIONS] [-- ARGUMENTS]",
    )
    add = parser.add_argument
    add("script", help=MAKE)
    add("--cluster", required=True, help="name of a shipped cluster with a uniform fabric")
    add("--gpus", type=numbers, required=True, help="numbers of GPUs, such as 8,64,512")
    add(
        "--strategies",
        default=",".join(DEFAULT),
        help="such as ddp,zero3,tp8+zero1,pp4+tp8+m16+zero1,fastest: ZeRO, axes, micro-batches",
    )
    add("--backend", default="inductor", help="as for autopar plan")
    add("--time-limit", type=limit_s, default=60.0, help="as for autopar plan, for each cell")
    add("--json", action="store_true", help=JSON)
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> None:
    """`autopar scale`: the global batch is the same in every cell."""
    model, inputs = load(options.script, options.rest)
    sizes = options.gpus
    strategies = {name: strategy_of(name) for name in options.strategies.split(",")}

    def planned(strategy: Strategy, gpus: int) -> Plan:
        return make_plan(
            model,
            gpus,
            example_inputs=inputs,
            strategy=strategy,
            cluster=cluster_for(options.cluster, gpus),
            backend=options.backend,
            time_limit_s=options.time_limit,
        )

    rows = {name: list(cells(s, sizes, planned)) for name, s in strategies.items()}
    if options.json:
        print_json(document(rows))
        return
    title = f"{type(model).__name__} on {options.cluster}, one global batch"
    console = PlainConsole(markup=True, width=None if sys.stdout.isatty() else 120)
    console.print(table(title, sizes, rows))
    for name, row in rows.items():
        for cell in row:
            if cell.why:
                print(f"{name} on {cell.gpus}: {cell.why}")


def cells(
    strategy: Strategy, sizes: Sequence[int], planned: Callable[[Strategy, int], Plan]
) -> Iterator[Cell]:
    """A strategy on each number of GPUs; errors become the cell's reason."""
    for gpus in sizes:
        try:
            p = planned(strategy, gpus).prediction
        except OutOfMemoryError as error:
            yield Cell(gpus, 0.0, 0.0, f"does not fit, {human_bytes(error.shortfall)} too much")
        except AutoparError as error:
            yield Cell(gpus, 0.0, 0.0, str(error))
        else:
            assert p is not None, "a given cluster is always priced"
            assert p.work is not None
            rate = (p.work.tokens or p.work.rows) / p.step_s
            yield Cell(gpus, rate, p.work.utilisation(p.step_s, gpus))


def document(rows: dict[str, list[Cell]]) -> list[dict[str, Any]]:
    """The cells as JSON: throughput a second, and model FLOPs utilisation."""
    return [
        {
            "strategy": name,
            "gpus": cell.gpus,
            "rate": cell.rate or None,
            "utilisation": cell.used or None,
            "why": cell.why or None,
        }
        for name, row in rows.items()
        for cell in row
    ]


def table(title: str, sizes: Sequence[int], rows: dict[str, list[Cell]]) -> Table:
    """Throughput, efficiency relative to the fewest GPUs, and utilisation."""
    grid = Table("strategy", title=title, title_justify="left")
    for gpus in sizes:
        grid.add_column(f"{gpus} GPUs", justify="right")
    best = [max(column, key=lambda cell: cell.rate) for column in zip(*rows.values(), strict=True)]
    for name, row in rows.items():
        first = next((cell for cell in row if cell.rate), None)
        texts = []
        for cell, top in zip(row, best, strict=True):
            text = _text(cell, first)
            texts.append(f"[bold]{text}[/bold]" if cell.rate and cell is top else text)
        grid.add_row(name, *texts)
    bar = STEPS["modelled"]
    slow, fast = bar.of_rate(1.0)
    grid.caption = (
        "tokens/s, efficiency against the fewest GPUs, model FLOPs utilisation; rates may be "
        f"{slow:.2f} to {fast:.2f} times these (nine in ten of {bar.source})"
    )
    return grid


def _text(cell: Cell, first: Cell | None) -> str:
    if first is None or not cell.rate:
        return "-"
    efficiency = cell.rate / cell.gpus / (first.rate / first.gpus)
    used = f" {cell.used:.0%}" if cell.used else ""
    return f"{cell.rate:,.0f} {efficiency:.0%}{used}"


def strategy_of(text: str) -> Strategy:
    """The strategy of a text such as "pp4+tp8+m16+zero1"; raises StrategyError for others."""
    if text in SEARCHED:
        return Strategy.of(text)
    found = Strategy()
    for part in text.split("+"):
        if part in ZERO_OF_NAME:
            found = replace(found, zero=ZERO_OF_NAME[part])
            continue
        match = re.fullmatch(r"(tp|cp|ep|pp|m)(\d{1,9})", part)
        if match is None:
            known = ", ".join([*SEARCHED, *ZERO_OF_NAME])
            raise StrategyError(
                f"--strategies: {part!r} of {text!r} is none of {known}, nor tp8, pp4 or m16 (that "
                "many micro-batches)"
            )
        fields: dict[str, Any] = {_FIELDS[match[1]]: int(match[2])}
        try:
            found = replace(found, **fields)
        except StrategyError as error:
            raise StrategyError(f"--strategies: {text!r}: {error}") from error
    return found


def cluster_for(name: str, gpus: int) -> Cluster:
    """A shipped cluster with a number of GPUs."""
    near = Cluster.named(name).ranks_per_node
    if gpus > near and gpus % near:
        raise StrategyError(f"--gpus {gpus}: a node of {name} has {near}, so give a multiple")
    return Cluster.named(name, max(1, gpus // near))


def numbers(text: str) -> list[int]:
    """The numbers of GPUs in a text such as "8,64,512"."""
    return [ranks(part) for part in text.split(",")]
