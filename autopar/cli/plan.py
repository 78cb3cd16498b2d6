"""`autopar plan`: a plan, without any of its ranks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from autopar.api import plan as make_plan
from autopar.cli.help_text import JSON, add_command, print_json
from autopar.cli.option_types import limit_s, ranks
from autopar.cli.plain_console import PlainConsole
from autopar.cli.progress import progress_bar
from autopar.cli.script import MAKE, load
from autopar.core.ir.placement import Placement
from autopar.core.plan.pipeline import SCHEDULES
from autopar.core.plan.plan import Plan
from autopar.core.plan.strategy import MESH, Strategy
from autopar.cost_model.cluster.cluster import Cluster, shipped_clusters
from autopar.errors import StrategyError
from autopar.report.brief import brief, coloured, figures, wrapped
from autopar.report.explain import with_reasons

FIXED = ("tp", "cp", "ep", "pp", "micro_batches", "schedule", "compress")
"""Options that are fields of a strategy with the same name."""


def add_to(commands: Any) -> None:
    """Adds the command to the parser's subcommands."""
    parser = add_command(
        commands,
        "plan",
        "choose how to train a model on N devices, without having them",
        "autopar plan gpt.py --cluster dgx-h100 --nodes 2 --html plan.html\n"
        "autopar plan package.module:make --world-size 4 --memory 20G --json",
        "Captures the model of make(), prices layouts (data parallel, ZeRO, tensor, pipeline, ...) "
        "on the cluster, and prints the fastest one that fits.",
        usage="autopar plan SCRIPT (--world-size N | --cluster NAME --nodes N)\n"
        "                    [OPTIONS] [-- ARGUMENTS OF THE SCRIPT]",
    )
    add = parser.add_argument
    add("script", help=MAKE)
    add("--world-size", type=ranks, help="number of ranks; by default those of the cluster")
    add("--nodes", type=ranks, help="number of nodes of a shipped cluster")
    add_strategy(parser, "fastest")
    add(
        "--lossy",
        action="store_true",
        help="allow lossy compression to bf16 or int8 where that is faster",
    )
    add("--memory", help="memory cap of a rank, such as 20G or 24GiB")
    add(
        "--time-limit",
        type=limit_s,
        default=60.0,
        metavar="SECONDS",
        help="seconds for the whole plan; the best one by then is returned",
    )
    names = ", ".join(shipped_clusters())
    add("--cluster", help=f"JSON file of a cluster, or one of {names}")
    add("--precision", help="dtype of autocast: bf16, fp16 or fp32 for none")
    add("--reduce-precision", help="bf16 to reduce gradients in bf16, which is lossy")
    add(
        "--backend",
        default="eager",
        help="compiler of the graphs; under inductor, fused operators are priced",
    )
    add_amount(parser)
    add("--out", help="JSON file to write the plan to")
    add("--html", help="HTML file to write the report to")
    parser.set_defaults(command=run)


def add_amount(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `print_plan` reads."""
    add = parser.add_argument
    add("-v", "--verbose", action="store_true", help="print the tables, too")
    add("--explain", action="store_true", help="print the reasons for this plan")
    add("--json", action="store_true", help=JSON)


def print_plan(plan: Plan, options: argparse.Namespace) -> None:
    """Prints a plan in a few lines, or as the options ask."""
    if options.json:
        print_json(figures(plan))
    elif options.explain:
        print(wrapped(with_reasons(plan)))
    elif options.verbose:
        print(wrapped(str(plan)))
    else:
        PlainConsole().print(coloured(brief(plan)), highlight=False, soft_wrap=True)


def add_strategy(parser: argparse.ArgumentParser, default: str) -> None:
    """Adds the options that `strategy_of` reads."""
    add = parser.add_argument
    add(
        "--strategy",
        default=default,
        help="fastest, auto (no pipelines), ddp, zero1, zero2, zero3 (default: %(default)s)",
    )
    add("--tp", type=ranks, help="tensor-parallel ranks")
    add("--cp", type=ranks, help="context-parallel ranks: only activations are sharded")
    add("--ep", type=ranks, help="expert-parallel ranks, outside of tp")
    add("--pp", type=ranks, help="pipeline-parallel ranks")
    add("--micro-batches", type=ranks, help="micro-batches of a rank's batch")
    add("--schedule", choices=SCHEDULES, help="pipeline schedule")
    searched = "axes whose size the planner searches: pp,tp,cp,ep,dp_shard"
    zero = "ZeRO stage of a block; others are searched"
    pin = "placement of a parameter along tp or ep"
    add("--search", metavar="AXES", help=searched)
    add("--zero", metavar="BLOCK=STAGE", action="append", help=zero)
    add("--pin", metavar="PARAMETER=S(DIM)|R", action="append", help=pin)
    add("--split-points", metavar="NAMES", help="first module of each stage but the first: a,b,c")
    add("--compress", help="lossy compression of gradients, such as int8")


def run(options: argparse.Namespace) -> None:
    """`autopar plan`."""
    cluster = cluster_of(options.cluster or ask_for_cluster(), options.nodes)
    world_size = options.world_size or (cluster.world_size if cluster else None)
    if world_size is None:
        raise StrategyError("for how many ranks? Give --world-size, or --cluster and --nodes")
    model, inputs = load(options.script, options.rest)
    with progress_bar() as progress:
        plan = make_plan(
            model,
            world_size,
            example_inputs=inputs,
            strategy=strategy_of(options),
            memory=options.memory,
            cluster=cluster,
            lossy=options.lossy,
            precision=options.precision,
            reduce_precision=options.reduce_precision,
            time_limit_s=options.time_limit,
            backend=options.backend,
            progress=progress,
        )
    print_plan(plan, options)
    if options.out:
        plan.save(options.out)
    if options.html:
        plan.report(options.html)
    if written := [path for path in (options.out, options.html) if path]:
        print(f"wrote {' and '.join(written)}", file=sys.stderr)


def strategy_of(options: argparse.Namespace) -> Strategy:
    """The strategy that the options describe."""
    found = Strategy.of(options.strategy)
    fields: dict[str, Any] = {name: getattr(options, name) for name in FIXED}
    fields = {name: value for name, value in fields.items() if value is not None}
    if options.search is not None:
        fields["search"] = tuple(options.search.split(",")) if options.search else ()
    elif any(axis in fields for axis in ("pp", *MESH)):
        fields["search"] = ()  # the options fix the mesh
    if options.zero:
        fields["zero"] = {block: int(stage) for block, stage in _pairs("--zero", options.zero)}
    if options.pin:
        pins = _pairs("--pin", options.pin)
        fields["placements"] = {name: Placement.of(text) for name, text in pins}
    if options.split_points:
        fields["split_points"] = tuple(options.split_points.split(","))
    return replace(found, **fields)


def _pairs(option: str, texts: Sequence[str]) -> list[tuple[str, str]]:
    pairs = [(name, value) for name, _, value in (text.rpartition("=") for text in texts)]
    good = {"--zero": ["0", "1", "2", "3"], "--pin": ["R", *(f"S({dim})" for dim in range(8))]}
    for text, (_, value) in zip(texts, pairs, strict=True):
        if value not in good[option] or "=" not in text:
            wanted = "blocks.0=3" if option == "--zero" else "head.weight=S(0)"
            raise StrategyError(f"{option} {text!r}: give a name and a value, such as {wanted}")
    return pairs


def cluster_of(name: str | None, nodes: int | None) -> Cluster | None:
    """The cluster of a name or file; with `nodes`, a shipped one of that many nodes."""
    if nodes is None:
        return Cluster.load(name) if name else None
    if name is None:
        raise StrategyError(f"--nodes {nodes} of which cluster? Give --cluster, such as dgx-h100")
    return Cluster.named(name, nodes)


def ask_for_cluster() -> str | None:
    """The cluster that a person at a terminal names; None for this CPU, which a line says."""
    names = ", ".join(shipped_clusters())
    if sys.stdin.isatty() and sys.stderr.isatty():
        print(f"for which cluster? {names}, or a file; empty for this CPU:", file=sys.stderr)
        if name := input().strip():
            return name
    print(
        "NO --cluster: THESE ARE PRICES OF PROCESSES ON THIS CPU, NOT OF GPUS. "
        f"--cluster takes a file, or {names}",
        file=sys.stderr,
    )
    return None
