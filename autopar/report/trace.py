"""`trace`: the predicted step of a plan as a Chrome trace.

Rows are grouped by rank and by mesh axis. Flows lead from each collective to the wait for it, and
from each message of a pipeline to the action that needs it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autopar.core.plan.layout import Layout
from autopar.core.plan.plan import Plan
from autopar.core.plan.prediction import Prediction
from autopar.core.plan.report_data import CollectiveCall, StageProgram, TimelineEvent
from autopar.cost_model.simulator.chrome_trace import (
    Bytes,
    Flow,
    Slice,
    chrome_trace,
    waited,
    write_trace,
)
from autopar.cost_model.simulator.streams import COMPUTE
from autopar.errors import PlanError
from autopar.report.event_names import EventNames
from autopar.report.html.memory import shown

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_KINDS = {"F": "forward", "B": "backward", "I": "input gradients", "W": "parameter gradients"}
_PP = "pp: messages between stages"


def write_timeline(path: str | Path, plan: Plan) -> None:
    """Writes the trace of a plan.

    Raises:
        PlanError: The plan has no prediction.
        StrategyError: the file cannot be written.
    """
    write_trace(path, trace(plan))


def trace(plan: Plan) -> dict[str, Any]:
    """Trace of the predicted rank, or of each pipeline rank, and of its messages.

    Raises:
        PlanError: The plan has no prediction.
    """
    p = plan.prediction
    if p is None:
        raise PlanError(
            f"the plan {plan.name!r} has no prediction: give a strategy that leaves something "
            "to choose, or a memory cap, and plan again"
        )
    if p.stages:
        drawn = _PipelineTrace(p)
        return chrome_trace(
            drawn.slices, {"memory of the rank that needs most": _memory(p)}, drawn.flows
        )
    rank = f"rank 0: {plan.name}"
    blocks = [
        Slice(rank, "blocks", block or "outside of blocks", start_s, end_s, phase)
        for block, phase, start_s, end_s in p.report_data.spans
    ]
    program = _program(p.events, p.report_data.calls, rank, dict(Layout(plan).axes))
    program.sort(key=lambda item: (item.row != COMPUTE, item.group, item.row))
    flows = _flows(program, p.report_data.calls)
    return chrome_trace([*blocks, *program], {rank: _memory(p)}, flows)


def _program(
    events: tuple[TimelineEvent, ...],
    calls: tuple[CollectiveCall, ...],
    rank: str,
    axes: Mapping[str, int],
) -> list[Slice]:
    """Slices of a program; each axis is a group of rows, one for each kind of collective."""
    names, found = EventNames(events, calls), []
    for event in events:
        node, stream, start_s, end_s, kind = event
        group, row = rank, COMPUTE
        if stream != COMPUTE:
            group, row = f"{stream}, {axes.get(stream, 0)} ranks", kind.replace("_", "-")
        args: dict[str, object] = {"node": node}
        if (call := names.calls.get(node)) is not None:
            args |= {"bytes": call.nbytes, "shapes": call.shapes, "block": call.block}
        found.append(Slice(group, row, names.of(event), start_s, end_s, kind, args))
    return found


def _flows(slices: Sequence[Slice], calls: Iterable[CollectiveCall]) -> Iterator[Flow]:
    return waited(slices, {call.wait: call.name for call in calls})


class _PipelineTrace:
    """Slices and flows of all ranks of a pipeline.

    Operators are those of a middle micro-batch, or of the last one, scaled to each action.
    """

    def __init__(self, p: Prediction) -> None:
        self.p, self.ranks = p, len(p.idle)
        self.programs: dict[tuple[int, str, bool], StageProgram] = {}
        for program in p.report_data.programs:
            for stage in program.stages:
                for kind, _, _ in program.actions:
                    first = (stage, kind, False) not in self.programs
                    self.programs[stage, kind, not first] = program
        self.last = max((int(found[3]) for e in p.events if (found := _action(e))), default=0)
        self.slices: list[Slice] = []
        self.flows: list[Flow] = []
        self.inputs: dict[tuple[int, bool, int], Slice] = {}  # by stage, forward, micro-batch
        for rank in range(self.ranks):
            self._rank(f"rank {rank}")
        for event in p.events:
            if " to " in event[1]:
                self._message(event)

    def _rank(self, rank: str) -> None:
        own, operators = [], []
        for event in self.p.events:
            name, stream, start_s, end_s, kind = event
            if stream != rank:
                continue
            if (found := _action(event)) is None:
                own.append(Slice(rank, "actions", name, start_s, end_s, kind))
                continue
            stage, what, micro = int(found[1]), found[2], int(found[3])
            said = f"{_KINDS[what]} {micro}, stage {stage}"
            args = {"stage": stage, "micro-batch": micro}
            own.append(Slice(rank, "actions", said, start_s, end_s, _KINDS[what], args))
            if what != "W":
                self.inputs[stage, what == "F", micro] = own[-1]
            operators += self._operators(own[-1], stage, what, micro == self.last)
        operators.sort(key=lambda item: (item.row != "operators", item.row))
        self.slices += [*own, *operators]

    def _operators(self, action: Slice, stage: int, kind: str, last: bool) -> list[Slice]:
        """Slices of the operators and collectives of an action."""
        program = self.programs.get((stage, kind, last)) or self.programs.get((stage, kind, False))
        if program is None:
            return []
        _, seconds, events = next(row for row in program.actions if row[0] == kind)
        scale = (action.end_s - action.start_s) / seconds if seconds else 0.0

        def moved(item: Slice) -> Slice:
            start_s, end_s = (action.start_s + scale * at for at in (item.start_s, item.end_s))
            row = "operators"
            if item.group != action.group:
                row = f"{item.group.partition(',')[0]}: {item.row}"
            return replace(item, group=action.group, row=row, start_s=start_s, end_s=end_s)

        found = [moved(item) for item in _program(events, program.calls, action.group, {})]
        self.flows += _flows(found, program.calls)
        return found

    def _message(self, event: TimelineEvent) -> None:
        """A message, and the flow to the action that needs it."""
        _, stream, start_s, end_s, kind = event
        found = _action(event)
        assert found is not None
        stage, forward, micro = int(found[1]), found[2] == "F", int(found[3])
        source = stage - 1 if forward else stage + 1
        what = "activations" if forward else "gradients"
        cost = self.p.stages[source]
        args: dict[str, object] = {"bytes": cost.sent_bytes if forward else cost.returned_bytes}
        if program := self.programs.get((source, "F", False)):
            args["shapes"] = program.sent if forward else program.returned
        said = f"{what} {micro} to stage {stage}"
        item = Slice(_PP, stream, said, start_s, end_s, kind, args)
        self.slices.append(item)
        if (target := self.inputs.get((stage, forward, micro))) is not None:
            self.flows.append((item, target))


def _action(event: TimelineEvent) -> re.Match[str] | None:
    return _ACTION.fullmatch(event[0])


def _memory(p: Prediction) -> Iterator[tuple[float, Bytes]]:
    """Bytes by category if known, otherwise of all tensors."""
    if not p.report_data.memory:
        yield from p.memory_curve
        return
    names = [shown(name) for name, _ in p.report_data.memory]
    columns = zip(*(row for _, row in p.report_data.memory), strict=True)
    for at, column in zip(p.report_data.memory_s, columns, strict=True):
        yield at, dict(zip(names, column, strict=True))
