"""`autopar show`: a plan, the program of one rank, or the placements of tensors."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from torch import nn

from autopar.capture.model_info import describe_parameters, device_of
from autopar.cli.help_text import add_command, print_json
from autopar.cli.option_types import rank
from autopar.cli.plain_console import PlainConsole
from autopar.cli.plan import add_amount, print_plan
from autopar.cli.script import load
from autopar.core.plan.decisions import check_plan
from autopar.core.plan.layout import Layout
from autopar.core.plan.plan import Plan
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.group_shape import GroupShape
from autopar.cost_model.measurement.operator_times import OperatorTimes
from autopar.formatting import printable
from autopar.planner.placement.costs import PlacementCosts
from autopar.planner.placement.dispatch import Dispatch, tokens_along
from autopar.planner.placement.table import PlacementTable, complete_strategies, placement_tables
from autopar.session.inspect import planned_strategies, program_text


def add_to(commands: Any) -> None:
    """Adds the command to the parser's subcommands."""
    parser = add_command(
        commands,
        "show",
        "print a plan that was saved, the program of one rank, or where tensors lie",
        "autopar show plan.json --explain\nautopar show plan.json --graph gpt.py --rank 1",
    )
    add = parser.add_argument
    add("plan", help="JSON file of a plan")
    add_amount(parser)
    add("--timeline", metavar="FILE", help="write the predicted step as a Chrome trace")
    add("--graph", metavar="SCRIPT", help="print the program of one rank, for the script's make()")
    add("--rank", type=rank, default=0)
    add(
        "--disable",
        metavar="NAME[,NAME]",
        default="",
        help="passes to leave out of the program of --graph",
    )
    add(
        "--placements",
        metavar="SCRIPT",
        help="print placements of parameters and activations along each model-parallel axis, block "
        "by block, and every redistribution, for the script's make()",
    )
    add(
        "--cluster",
        metavar="NAME|FILE",
        help="cluster of the times of --placements; by default they are modelled",
    )
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> None:
    """`autopar show`."""
    plan = Plan.load(options.plan)
    if options.graph:
        model, example_inputs = load(options.graph, options.rest)
        disable = tuple(filter(None, options.disable.split(",")))
        text = program_text(model, example_inputs, plan=plan, rank=options.rank, disable=disable)
        print(printable(text))
        return
    if options.placements:
        cluster = Cluster.load(options.cluster) if options.cluster else None
        found = placements(*load(options.placements, options.rest), plan, cluster)
        if options.json:
            print_json([item if isinstance(item, str) else item.to_dict() for item in found])
            return
        console = PlainConsole()
        for item in found:
            shown = item if isinstance(item, str) else item.table()
            console.print(shown, markup=False, highlight=False)
        return
    if options.timeline:
        plan.timeline(options.timeline)
    print_plan(plan, options)


def placements(
    model: nn.Module, example_inputs: Any, plan: Plan, cluster: Cluster | None
) -> Iterator[PlacementTable | str]:
    """Placements of all tensors along each model-parallel axis of a plan.

    Times are those of the cluster, modelled if it is None. Raises PlanError for another model.
    """
    check_plan(plan, model, describe_parameters(model).values(), plan.world_size)
    if not plan.partitions:
        yield f"{plan.name}: the model is not partitioned; plan with Strategy(tp=...), or --tp"
    cluster = cluster or Cluster.default(plan.world_size, device_of(model).type)
    mesh, times = Layout(plan).axes, OperatorTimes.load(cluster.device)
    shapes = {axis: GroupShape.of_axis(mesh, axis, cluster.ranks_per_node) for axis in mesh}
    once = {partition.axis: partition.once for partition in plan.partitions}
    for axis, graph, op_strategies in planned_strategies(model, example_inputs, plan):
        yield f"along {axis}, {mesh[axis]} ranks; {cluster.name}, {cluster.provenance}"
        tokens = Dispatch(once[axis], tokens_along(graph, mesh[axis]) if once[axis] else {})
        prices = PlacementCosts(shapes[axis], cluster, times, others=shapes, dispatch=tokens)
        yield from placement_tables(graph, complete_strategies(graph, op_strategies), prices)
