"""`autopar scale`: predicted throughput by number of GPUs, for each strategy."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from autopar.api import plan as make_plan
from autopar.cli.help_text import JSON, add_command, print_json
from autopar.cli.option_types import amount, limit_s, ranks
from autopar.cli.plain_console import PlainConsole
from autopar.cli.script import MAKE, load
from autopar.core.common.deadline import Deadline
from autopar.core.common.documents import write_text
from autopar.core.plan.plan import Plan
from autopar.core.plan.strategy import SEARCHED, ZERO_OF_NAME, Strategy
from autopar.cost_model.cluster.cluster import Cluster, shipped_clusters
from autopar.errors import AutoparError, OutOfMemoryError, StrategyError
from autopar.formatting import human_bytes
from autopar.planner.extended.reduced_models import only_few_blocks
from autopar.report.html.scaling import scaling_page
from autopar.report.scaling import ScalePoint, Scaling

DEFAULT = ("ddp", "zero1", "zero3", "tp8+zero1")
_FIELDS = {"tp": "tp", "cp": "cp", "ep": "ep", "pp": "pp", "m": "micro_batches"}


def add_to(commands: Any) -> None:
    """Adds the command to the parser's subcommands."""
    parser = add_command(
        commands,
        "scale",
        "predict throughput, memory and cost by number of GPUs, for each strategy",
        "autopar scale gpt.py --cluster dgx-h100 --gpus 8,64 --strategies ddp,zero3\n"
        "autopar scale gpt.py --cluster dgx-h100 --gpus 8,64 --price 2 --report a.html",
        "The global batch of make() is the same for every number of GPUs.",
        usage="autopar scale SCRIPT --cluster NAME --gpus 8,64 [OPTIONS] [-- ARGUMENTS]",
    )
    add = parser.add_argument
    add("script", help=MAKE)
    names = ", ".join(shipped_clusters())
    add("--cluster", required=True, help=f"cluster with a uniform fabric, of {names}")
    add("--gpus", type=numbers, required=True, help="numbers of GPUs, such as 8,64,512")
    add(
        "--strategies",
        default=",".join(DEFAULT),
        help="such as ddp,zero3,tp8+zero1,pp4+tp8+m16+zero1,fastest: ZeRO, axes, micro-batches",
    )
    add("--price", type=amount, help="price of a GPU hour, for the cost of a million tokens")
    add("--report", metavar="FILE", help="HTML file to write charts to")
    add("--backend", default="inductor", help="as for autopar plan")
    add(
        "--time-limit",
        type=limit_s,
        default=120.0,
        help="seconds for all predictions (default 120)",
    )
    add("--json", action="store_true", help=JSON)
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> None:
    """`autopar scale`: the global batch is the same for every number of GPUs."""
    model, inputs = load(options.script, options.rest)
    strategies = {name: strategy_of(name) for name in options.strategies.split(",")}
    made, deadline = list[Plan](), Deadline(options.time_limit)
    left = iter(range(len(strategies) * len(options.gpus), 0, -1))

    def planned(strategy: Strategy, gpus: int) -> Plan:
        limit_s = deadline.left_s / next(left)  # an even share of what is left
        made.append(
            make_plan(
                model,
                gpus,
                example_inputs=inputs,
                strategy=strategy,
                cluster=cluster_for(options.cluster, gpus),
                backend=options.backend,
                time_limit_s=limit_s,
            )
        )
        return made[-1]

    with only_few_blocks():
        rows = {name: list(points(s, options.gpus, planned)) for name, s in strategies.items()}
    work = made[0].prediction.work if made and made[0].prediction else None
    unit = "rows" if work and not work.tokens else "tokens"
    cap = made[0].memory_cap if made else None
    found = Scaling(type(model).__name__, options.cluster, rows, unit, options.price, cap)
    if options.report:
        write_text(options.report, scaling_page(found), StrategyError)
    if options.json:
        print_json(found.to_dict())
        return
    console = PlainConsole()
    console.print(found.table())
    for line in found.failures():
        console.print(line, soft_wrap=True, highlight=False)


def points(
    strategy: Strategy, sizes: Sequence[int], planned: Callable[[Strategy, int], Plan]
) -> Iterator[ScalePoint]:
    """A strategy on each number of GPUs; errors become the point's reason."""
    for gpus in sizes:
        try:
            plan = planned(strategy, gpus)
        except OutOfMemoryError as error:
            why = f"does not fit, {human_bytes(error.shortfall)} too much"
            yield ScalePoint(gpus, why=why)
        except AutoparError as error:
            yield ScalePoint(gpus, why=str(error))
        else:
            assert plan.prediction is not None, "a given cluster is always priced"
            yield ScalePoint.of(gpus, plan.name, plan.prediction)


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
