"""The command line: `autopar plan | show | diff | run | profile | measure | collectives | ...`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

from autopar.api import plan as make_plan
from autopar.commands import collectives, import_nccl_tests, measure, profile, scale, show
from autopar.commands.launch import add_script, launch
from autopar.commands.script import load
from autopar.cost_model.cluster import Cluster
from autopar.errors import AutoparError, StrategyError
from autopar.pipeline import SCHEDULES
from autopar.plan import Plan
from autopar.strategy import Strategy


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    cut = given.index("--") if "--" in given else len(given)
    options = parser().parse_args(given[:cut])
    options.rest = given[cut + 1 :]
    try:
        return int(options.command(options) or 0)
    except (AutoparError, OSError) as error:
        print(f"autopar: {error}", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    top = argparse.ArgumentParser(prog="autopar", description=__doc__)
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    plan = commands.add_parser(
        "plan",
        help="plan for ranks that need not be there",
        usage="autopar plan SCRIPT (--world-size N | --cluster NAME --nodes N) [OPTIONS] "
        "[-- ARGUMENTS OF THE SCRIPT]",
    )
    plan.add_argument("script", help="Python file with make() -> (model, example inputs)")
    plan.add_argument("--world-size", type=int, help="ranks; by default those of the cluster")
    plan.add_argument("--nodes", type=int, help="nodes of a cluster that ships")
    plan.add_argument("--strategy", default="auto")
    plan.add_argument("--tp", type=int, help="ranks over which the model itself is partitioned")
    plan.add_argument("--cp", type=int, help="ranks over which only activations are")
    plan.add_argument("--ep", type=int, help="ranks over which it is, inside of tp")
    plan.add_argument("--pp", type=int, help="ranks over which the forward is cut into stages")
    plan.add_argument("--micro-batches", type=int, help="parts of a rank's rows, one after another")
    plan.add_argument("--schedule", choices=SCHEDULES, help="the order in which they pass")
    plan.add_argument("--compress", help="gradients by this method, such as int8; lossy")
    plan.add_argument("--lossy", action="store_true", help="by bf16 or int8 where that is faster")
    plan.add_argument("--memory", help="cap per rank, such as 24GiB")
    plan.add_argument("--cluster", help="JSON file of a cluster, or one that ships")
    plan.add_argument("--precision", help="of the forward, under autocast: bf16 or fp16")
    plan.add_argument(
        "--backend", default="eager", help="what compiles the graphs; inductor is priced fused"
    )
    plan.add_argument("--out", help="write the plan as JSON")
    plan.add_argument("--html", help="write the report")
    plan.set_defaults(command=run_plan)

    scale.add_to(commands)
    show.add_to(commands)

    diff = commands.add_parser("diff", help="what differs between two plans")
    diff.add_argument("first")
    diff.add_argument("second")
    diff.set_defaults(command=run_diff)

    run = commands.add_parser(
        "run",
        help="launch a script on several processes of this machine",
        usage="autopar run SCRIPT [--nproc N] [-- ARGUMENTS OF THE SCRIPT]",
    )
    add_script(run)
    run.set_defaults(command=run_script)

    profile.add_to(commands)
    measure.add_to(commands)
    collectives.add_to(commands)
    import_nccl_tests.add_to(commands)
    return top


def run_plan(options: argparse.Namespace) -> None:
    """`autopar plan`."""
    cluster = cluster_of(options.cluster, options.nodes)
    ranks = options.world_size or (cluster.world_size if cluster else None)
    if ranks is None:
        raise StrategyError("for how many ranks? Give --world-size, or --cluster and --nodes")
    model, inputs = load(options.script, options.rest)
    given = ("tp", "cp", "ep", "pp", "micro_batches", "schedule", "compress")
    axes = {name: getattr(options, name) for name in given}
    plan = make_plan(
        model,
        ranks,
        example_inputs=inputs,
        strategy=replace(Strategy.of(options.strategy), **axes),
        memory=options.memory,
        cluster=cluster,
        lossy=options.lossy,
        precision=options.precision,
        backend=options.backend,
    )
    print(plan)
    if options.out:
        plan.save(options.out)
    if options.html:
        plan.report(options.html)


def cluster_of(name: str | None, nodes: int | None) -> Cluster | None:
    """The cluster that was asked for: a file, or one that ships, of so many nodes."""
    if nodes is None:
        return Cluster.load(name) if name else None
    if name is None:
        raise StrategyError(f"--nodes {nodes} of which cluster? Give --cluster, such as dgx-h100")
    return Cluster.named(name, nodes)


def run_diff(options: argparse.Namespace) -> int:
    """`autopar diff`: exit status 1 if the plans differ, as diff has it."""
    text = Plan.load(options.first).diff(Plan.load(options.second))
    print(text or "the plans are the same")
    return 1 if text else 0


def run_script(options: argparse.Namespace) -> int:
    """`autopar run`: torchrun on this machine, with cores shared out."""
    return launch(options.script, options.nproc, options.rest)


if __name__ == "__main__":
    raise SystemExit(main())
