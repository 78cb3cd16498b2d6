"""`StageInterface`: the values that cross between the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import fx

from autopar.errors import StrategyError
from autopar.ir.graph import source_line
from autopar.ir.roles import InputRole, MicrobatchPartial, OutputRole, StageInput, StageOutput
from autopar.passes.pipeline_parallel.stage_assignment import StageAssignment


@dataclass(frozen=True)
class StageInterface:
    """Values that cross between stages, prologue and epilogue.

    Attributes:
        needed: for each stage, the nodes that it computes or reads.
        sent: for each stage, the values that it sends.
        received: for each stage, the values that it receives.
        totals: index of the `BatchTotal` of each value that is read as a total.
        late_reads: for each stage, the values of `totals` that its backward reads.
        prologue: nodes of the prologue.
        epilogue: nodes of the epilogue.
    """

    needed: tuple[tuple[fx.Node, ...], ...]
    sent: tuple[Mapping[OutputRole, fx.Node], ...]
    received: tuple[Mapping[fx.Node, InputRole], ...]
    totals: Mapping[fx.Node, int]
    late_reads: tuple[frozenset[fx.Node], ...]
    prologue: tuple[fx.Node, ...]
    epilogue: tuple[fx.Node, ...]


def stage_interface(assignment: StageAssignment) -> StageInterface:
    """Finds the values that cross between stages.

    Raises:
        StrategyError: an earlier stage needs a value of a later forward, or the epilogue needs
            the value of a parameter.
    """
    stage, stages = assignment.stage, range(assignment.num_stages)
    needed = tuple(tuple(_needed(assignment, index)) for index in stages)
    late_reads = [list(_late_reads(assignment, nodes)) for nodes in needed]
    epilogue = tuple(_ancestors(assignment, assignment.epilogue.values()))
    prologue = tuple(_ancestors(assignment, assignment.prologue.values()))
    read = (*(n for reads in late_reads for n in reads), *epilogue, *prologue)
    first = sum(isinstance(role, MicrobatchPartial) for role in assignment.graph.outputs)
    totals = dict.fromkeys(node for node in read if node in stage)
    sent, received = _transfers(assignment, needed)
    return StageInterface(
        needed,
        sent,
        received,
        {node: first + index for index, node in enumerate(totals)},
        tuple(map(frozenset, late_reads)),
        prologue,
        epilogue,
    )


def _needed(assignment: StageAssignment, stage: int) -> dict[fx.Node, None]:
    """The nodes that a stage computes or reads."""
    found: dict[fx.Node, None] = {}
    todo = [n for n, at in assignment.stage.items() if at == stage and n not in assignment.skipped]
    todo += [term for terms in assignment.outputs[stage].values() for term in terms]
    while todo:
        node = todo.pop()
        if node in found:
            continue
        found[node] = None
        if _is_late(assignment, node):
            todo += [n for n in node.all_input_nodes if n not in assignment.stage]
        elif assignment.computes(stage, node):
            todo += node.all_input_nodes
    return found


def _late_reads(assignment: StageAssignment, nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """The staged values that operators read as totals over the batch."""
    for node in nodes:
        if _is_late(assignment, node):
            yield from (n for n in node.all_input_nodes if n in assignment.stage)


def _is_late(assignment: StageAssignment, node: fx.Node) -> bool:
    return assignment.dependence[node] == "totals" and node.op == "call_function"


def _ancestors(assignment: StageAssignment, nodes: Iterable[fx.Node]) -> dict[fx.Node, None]:
    """Nodes and their ancestors, up to staged values."""
    found: dict[fx.Node, None] = {}
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node in found:
            continue
        found[node] = None
        if node in assignment.stage:
            continue
        if assignment.dependence[node] == "parameters":
            raise StrategyError(
                f"{node} is a parameter's value that every stage would have to return "
                f"({source_line(node)}): return a copy that is computed from inputs too"
            )
        todo += node.all_input_nodes
    return found


def _transfers(
    assignment: StageAssignment, needed: tuple[tuple[fx.Node, ...], ...]
) -> tuple[tuple[dict[OutputRole, fx.Node], ...], tuple[dict[fx.Node, InputRole], ...]]:
    """The values that each stage sends and receives; stages in between forward a value."""
    sent: tuple[dict[OutputRole, fx.Node], ...] = tuple({} for _ in needed)
    received: tuple[dict[fx.Node, InputRole], ...] = tuple({} for _ in needed)
    readers: dict[fx.Node, list[int]] = {}
    for stage, nodes in enumerate(needed):
        for node in nodes:
            if not assignment.computes(stage, node):
                readers.setdefault(node, []).append(stage)
    for number, node in enumerate(sorted(readers)):
        own, phase, reading = assignment.stage[node], node.meta["phase"], readers[node]
        if phase == "backward":
            path = range(own, min(reading) - 1, -1)
        else:
            path = range(own, max(reading) + 1)
        if not set(reading) <= set(path):
            raise StrategyError(
                f"the cut goes through what cannot be cut: {node} of stage {own} is needed by "
                f"stage {min(reading)} ({source_line(node)}). Cut elsewhere (split_points=...)."
            )
        for stage in path[1:]:
            received[stage][node] = StageInput(number, phase)
        for stage in path[:-1]:
            sent[stage][StageOutput(number, phase)] = node
    return sent, received
