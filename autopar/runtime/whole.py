"""Calls of a model that each rank runs as a whole: each kind of call is lowered once, then run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.graph import BatchIndex, Buffer, Evidence, Input, Parameter, RowWeight
from autopar.notices import warn_of_differences
from autopar.runtime.batch import Share, check_twins, check_verdict, evidence
from autopar.runtime.calls import ways_of_call
from autopar.runtime.channel import settle
from autopar.runtime.groups import backend_of, rank
from autopar.runtime.parameters import local
from autopar.runtime.program import Half, Program, build, with_axes
from autopar.runtime.setting import Setting
from autopar.runtime.step import Running, Step, run_forward
from autopar.runtime.written import result_of


@dataclass
class Whole:
    """Runs the calls of a module whose plan has no stages.

    Attributes:
        setting: what they share.
        programs: of each kind of call.
    """

    setting: Setting
    programs: dict[Any, Program] = field(default_factory=dict)

    def run(self, leaves: list[Any], share: Share, hold: bool) -> Any:
        """The result of a call.

        Args:
            leaves: the flattened arguments.
            share: this rank's rows of them.
            hold: keep gradients on this rank.
        """
        setting, program = self.setting, self._program(share, hold)
        state = setting.guards.state
        running = Running(
            program,
            lambda program: self._arguments(program, leaves, share),
            differentiable=(),
            backward_half=lambda p: self._backward(p, share, hold, state),
            general=lambda: self._general(share, hold, state),
            held=setting.held,
            states=setting.states,
            wrap=setting.wrap,
            updates={},
        )
        with setting.random.during(program.is_random), setting.without_autocast():
            if program.backward is None:
                with torch.no_grad():
                    outputs = run_forward(running, program)[0]
            else:
                running.differentiable, tensors = setting.differentiable(share)
                outputs = Step.apply(running, *tensors)
        settle()  # there may have been no collective
        self._finish(running, share, program.capture.rebound)
        result = list(program.capture.leaves)
        for index, value in zip(program.returned, outputs, strict=True):
            result[index] = value
        return result_of(program.capture, result, setting.model)

    def _program(self, share: Share, hold: bool = False, held: tuple[str, ...] = ()) -> Program:
        setting, plan = self.setting, self.setting.plan
        assert plan is not None
        key = (*setting.key(share), torch.is_grad_enabled(), hold, held)
        if key not in self.programs:
            captured = setting.agreed_capture(share)
            graph, ways = with_axes(captured.graph, plan), setting.make_ways
            self.programs[key] = build(
                captured,
                plan,
                rank=rank(),
                ways=ways_of_call(graph, plan, rank(), share.total, share.count, ways),
                comm_backend=backend_of(setting.device),
                groups=setting.groups,
                compile_backend=setting.options.backend,
                hold=hold,
                held=held,
                recorder=setting.options.recorder,
            )
            if not setting.options.on_trial:
                warn_of_differences(self.programs[key].graph.notes)
        return self.programs[key]

    def _arguments(self, program: Program, leaves: list[Any], share: Share) -> list[Any]:
        setting = self.setting
        named, buffers = setting.inside.parameters, setting.inside.buffers()
        inputs = dict(zip(share.call.places, share.tensors, strict=True))
        values: list[Any] = []
        for role in program.forward.inputs:
            match role:
                case Parameter(name):
                    values.append(local(named[name]).detach())
                case Buffer(name):
                    values.append(buffers[name])
                case Input(index):
                    values.append(inputs[index].detach())
                case RowWeight():
                    weight = share.rows / share.total
                    values.append(torch.tensor(weight, dtype=torch.float64, device=setting.device))
                case BatchIndex():
                    values.append(share.slices.place(setting.device))
                case Evidence(axis):
                    mode = "global" if axis else setting.options.batch
                    values.append(evidence(leaves, share.rows, mode, setting.device))
        return values

    def _backward(self, program: Program, share: Share, hold: bool, state: int) -> Half:
        """The backward that adds what is held at the time that it runs."""
        if hold or not self.setting.held:
            half = program.backward
        else:
            with torch.enable_grad(), self.setting.guards.as_of(state):
                half = self._program(share, False, tuple(sorted(self.setting.held))).backward
        assert half is not None
        return half

    def _general(self, share: Share, hold: bool, state: int) -> Program:
        """The call with gradients entering by every output, from now on."""
        self.setting.all_tangents = True
        with torch.enable_grad(), self.setting.guards.as_of(state):
            return self._program(share, hold)

    def _finish(self, running: Running, share: Share, rebound: frozenset[str]) -> None:
        options = self.setting.options
        for axis, verdict in running.verdicts.items():
            if axis:
                check_twins(verdict, options.tensor_ranks)
            else:
                check_verdict(verdict, options.data_ranks, options.batch)
        buffers = self.setting.inside.buffers()
        inputs = dict(zip(share.call.places, share.tensors, strict=True))
        with torch.no_grad():
            for of, value in running.updates.items():
                if isinstance(of, Buffer) and of.name in rebound:
                    self.setting.rebind(of.name, value.clone())
                    continue
                target = buffers[of.name] if isinstance(of, Buffer) else inputs[of.index]
                target.copy_(value)
        running.updates.clear()  # the caller may hold the loss, and by it all this, for a step more
