"""Calls of a pipelined model: each kind of call is cut and lowered once, then run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Any

import torch
from torch import distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from autopar._torch import pytree
from autopar.capture import Capture
from autopar.graph import Input, Parameter
from autopar.plan import Plan
from autopar.runtime.batch import Share, check_twins, check_verdict, evidence
from autopar.runtime.calls import MakeWays, ways_of_call
from autopar.runtime.groups import backend_of, failing_together, group_names, rank
from autopar.runtime.inside import Inside
from autopar.runtime.parameters import local
from autopar.runtime.pipelined import Call, Pipe
from autopar.runtime.program import with_axes
from autopar.runtime.random import RandomStream
from autopar.runtime.staged import build_staged
from autopar.runtime.step import Differentiable


@dataclass
class Pipes:
    """Runs the calls of a module whose plan has stages.

    Attributes:
        plan: the plan.
        mesh: of its axes; None for one rank.
        device: of tensors.
        backend: "eager", or a backend of torch.compile.
        capture: captures a call at the rows of a micro-batch.
        key: of a kind of call.
        inside: what the model holds.
        random: this rank's stream.
        held: local gradients kept from earlier calls, by parameter.
        wrap: makes a parameter's gradient out of its local part.
        enter_by_all: lets gradients enter by every output from now on.
        make_ways: finds the ways of a call that was not planned for.
    """

    plan: Plan
    mesh: DeviceMesh | None
    device: torch.device
    backend: str
    capture: Callable[[Share], Capture]
    key: Callable[[Share], tuple[Any, ...]]
    inside: Callable[[], Inside]
    random: RandomStream
    held: dict[str, torch.Tensor]
    wrap: Callable[[str, torch.Tensor], torch.Tensor]
    enter_by_all: Callable[[], None]
    make_ways: MakeWays
    known: dict[Any, Pipe] = field(default_factory=dict)
    tangent: float = 1.0

    def run(self, leaves: Sequence[Any], share: Share, hold: bool) -> Any:
        """The result of a call, the same on every rank of the pipeline.

        Args:
            leaves: the flattened arguments.
            share: this rank's rows of them.
            hold: keep gradients on this rank.
        """
        self._agree(leaves, share)
        shares = share.micro_batches(self._micro_batches(share))
        call = self._call(shares, hold)
        pipe = call.pipe
        with self.random.during(pipe.program.is_random), _no_autocast(self.device):
            if pipe.program.differentiates:
                roles, tensors = self._differentiable(share)
                outputs = _Run.apply(_Under(self, call, shares, hold, roles), *tensors)
            else:
                outputs = call.run()
        buffers = self.inside().buffers()
        with torch.no_grad():
            for name, value in call.updates.items():
                buffers[name].copy_(value)
        result = list(pipe.program.capture.leaves)
        for index, value in zip(call.returned, outputs, strict=True):
            result[index] = value
        return pytree.tree_unflatten(result, pipe.program.capture.structure)

    def _agree(self, leaves: Sequence[Any], share: Share) -> None:
        """Ranks that share rows must have been given the same, before anything is sent."""
        ranks, data = self.plan.world_size, self.plan.data_ranks
        if ranks == 1:
            return
        row = self.plan.place(rank())[self.plan.axis]
        own = torch.zeros(data + 1, 4, dtype=torch.float64, device=self.device)
        own[row] = evidence(leaves, share.rows, "global", self.device)
        own[data] = evidence(leaves, share.rows, self.plan.batch, self.device)
        with failing_together("a pipeline"):
            dist.all_reduce(own)
        if self.plan.batch == "local":
            for verdict in own[:data]:
                check_twins(verdict, ranks // data)
        check_verdict(own[data], ranks, self.plan.batch)

    def _micro_batches(self, share: Share) -> int:
        """As many as planned; fewer for a smaller batch that these do not divide."""
        assert self.plan.pipeline is not None
        planned, rows = self.plan.pipeline.micro_batches, share.rows
        if rows * share.slices != share.total:
            return 1
        return gcd(planned, rows) if rows < self.plan.pipeline.rows else planned

    def _call(self, shares: list[Share], hold: bool) -> Call:
        inside = self.inside()
        return Call(
            self._pipe(shares[0], len(shares), hold),
            shares,
            {name: local(value).detach() for name, value in inside.parameters.items()},
            inside.buffers(),
            self.held,
            hold,
            self.tangent,
        )

    def _pipe(self, share: Share, count: int, hold: bool) -> Pipe:
        """What runs calls in so many micro-batches, of which `share` is one."""
        held = () if hold else tuple(sorted(self.held))
        key = (*self.key(share), torch.is_grad_enabled(), count, hold, held)
        if key not in self.known:
            captured = self.capture(share)
            graph = with_axes(captured.graph, self.plan)
            program = build_staged(
                captured,
                self.plan,
                rank=rank(),
                ways=ways_of_call(
                    graph, self.plan, rank(), share.total, share.slices, self.make_ways
                ),
                micro_batches=count,
                comm_backend=backend_of(self.device),
                groups=group_names(self.mesh),
                compile_backend=self.backend,
                hold=hold,
                held=held,
            )
            group = None
            if self.mesh is not None and "pp" in (self.mesh.mesh_dim_names or ()):
                group = self.mesh.get_group("pp")
            self.known[key] = Pipe(program, self.plan, rank(), self.device, group)
        return self.known[key]

    def _differentiable(
        self, share: Share
    ) -> tuple[tuple[Differentiable | None, ...], list[torch.Tensor]]:
        """What autograd is told that a call depends on; something, on every rank."""
        roles: list[Differentiable | None] = [None]
        tensors = [torch.zeros((), device=self.device, requires_grad=True)]
        for name, parameter in self.inside().parameters.items():
            if parameter.requires_grad:
                roles.append(Parameter(name))
                tensors.append(parameter)
        for index, tensor in zip(share.call.places, share.tensors, strict=True):
            if tensor.requires_grad:
                roles.append(Input(index))
                tensors.append(tensor)
        return tuple(roles), tensors

    def general(self, shares: list[Share], hold: bool) -> Call:
        """A call again, up to its backward, with gradients entering by every output."""
        self.enter_by_all()
        with torch.enable_grad():
            call = self._call(shares, hold)
        call.run()
        return call


@dataclass
class _Under:
    """A call inside autograd."""

    pipes: Pipes
    call: Call
    shares: list[Share]
    hold: bool
    roles: tuple[Differentiable | None, ...]


class _Run(torch.autograd.Function):
    """The forward and backward of one call, as autograd sees them."""

    @staticmethod
    def forward(ctx: Any, under: _Under, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Runs the schedule, or its forwards."""
        ctx.under = under
        ctx.set_materialize_grads(False)
        call = under.call
        outputs = call.run()
        flags = call.pipe.program.capture.differentiable
        pairs = zip(outputs, call.returned, strict=True)
        ctx.mark_non_differentiable(*(value for value, index in pairs if not flags[index]))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Runs the backwards, or takes what they gave."""
        under: _Under = ctx.under
        call, pipes = under.call, under.pipes
        pairs = zip(call.returned, gradients, strict=True)
        given = {index: gradient for index, gradient in pairs if gradient is not None}
        if not call.pipe.tangents.issuperset(given):
            call = pipes.general(under.shares, under.hold)
        call.backward(given)
        if call.at_once and given:
            pipes.tangent = float(next(iter(given.values()))) or 1.0
        found: list[torch.Tensor | None] = []
        for role in under.roles:
            match role:
                case Parameter(name):
                    gradient = call.step.gradients.pop(name, None)
                    found.append(None if gradient is None else pipes.wrap(name, gradient))
                case Input(index):
                    found.append(call.gradient_of_input(index, _like(under.shares, index)))
                case _:
                    found.append(None)
        return (None, *found)


def _like(shares: list[Share], index: int) -> torch.Tensor:
    """A tensor like the rank's rows of an argument."""
    parts = [dict(zip(s.call.places, s.tensors, strict=True))[index] for s in shares]
    split = shares[0].call.has_rows[index] and len(shares) > 1
    return torch.zeros_like(torch.cat(parts) if split else parts[0])


def _no_autocast(device: torch.device) -> Any:
    return torch.autocast(device.type, enabled=False)
