"""`ExecutionContext`: what all calls of a module share, and their captures."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar._torch import dtensor_like
from autopar.capture.batch_shards import BatchShard
from autopar.capture.batch_slices import capture_slice
from autopar.capture.call import Call
from autopar.capture.state.effects import attribute_of
from autopar.capture.state.guards import Guards
from autopar.capture.trace import Capture, capture
from autopar.errors import StrategyError
from autopar.ir.graph import ParameterInfo
from autopar.ir.roles import Differentiable, Input, Parameter
from autopar.report.plan import Plan
from autopar.runtime.agreement.captured_graph import agree_on_graph
from autopar.runtime.agreement.consensus import run_on_all_ranks
from autopar.runtime.call_partitions import MakeStrategies
from autopar.runtime.options import Options
from autopar.runtime.parameters.compression_state import CompressionState
from autopar.runtime.parameters.distribute import is_remote, local_part
from autopar.runtime.rng import RandomStream
from autopar.runtime.written import warn_of_local_writes


@dataclass
class ExecutionContext:
    """What all calls of a module share.

    Attributes:
        model: the model.
        parameters: what is known of its parameters.
        device: of tensors.
        options: how calls are captured and run.
        random: this rank's stream of random numbers.
        make_strategies: finds the ways of a call that was not planned for.
        plan: None until there is one.
        mesh: of the plan; None for one rank.
        groups: process group of each axis and level, by name.
        held: local gradients kept from earlier calls, by parameter.
        states: what compression keeps from step to step.
        captures: of each kind of call.
        attempts: while there is no plan, what was captured at some rows, for any division of them.
        all_tangents: whether gradients may enter by every output.
    """

    model: nn.Module
    parameters: Mapping[str, ParameterInfo]
    device: torch.device
    options: Options
    rng: RandomStream
    make_strategies: MakeStrategies
    plan: Plan | None = None
    mesh: DeviceMesh | None = None
    groups: Mapping[str, str] = field(default_factory=dict)
    unreduced_grads: dict[str, torch.Tensor] = field(default_factory=dict)
    compression_state: CompressionState = field(default_factory=CompressionState)
    captures: dict[Any, Capture] = field(default_factory=dict)
    planning_captures: dict[Any, Capture] = field(default_factory=dict)
    all_tangents: bool = False

    @cached_property
    def index(self) -> ModuleIndex:
        """What the model holds, looked up once: calls are many, and modules seldom change."""
        return ModuleIndex.of(self.model, self.guards.lifted)

    @cached_property
    def guards(self) -> Guards:
        """The Python state that captures depend on."""
        return Guards(self.model, self.parameters)

    def index_model(self) -> None:
        """Learns what changed in Python since the last call; before every call."""
        if self.guards.update():
            self.__dict__.pop("index", None)

    def reindex_model(self) -> None:
        """Forgets what the model held: its parameters were replaced."""
        self.__dict__.pop("index", None)
        self.guards.invalidate()

    def rebind(self, name: str, value: torch.Tensor) -> None:
        """Gives a buffer, or an attribute that is carried as one, a new tensor."""
        module, key = self.index.buffer_owners[name]
        holder = module._buffers if key in module._buffers else vars(module)
        self.guards.rebind(holder, key, value)

    def capture(self, share: BatchShard, for_planning: bool = False) -> Capture:
        """Captures a call; the backward too, if it may be wanted."""
        differentiate = for_planning or torch.is_grad_enabled()
        key = (*self.call_key(share), differentiate)
        if key not in self.captures:
            self.guards.check_current()
            known = self.planning_captures if for_planning else {}
            made = self._capture(share, differentiate, known)
            key = (*self.call_key(share), differentiate)  # what it reads may make the state another
            self.captures[key] = made
        return self.captures[key]

    def capture_on_all_ranks(self, share: BatchShard) -> Capture:
        """Captures a call on every rank at once, and compares what was captured.

        Raises:
            DisagreementError: the ranks' forward or loss_fn compute different things.
        """
        captured = run_on_all_ranks(lambda: self.capture(share))
        even = not self.options.local or share.slices.is_even
        agree_on_graph(captured.captured_graph, even=even)
        return captured

    def _capture(
        self, share: BatchShard, differentiate: bool, known: dict[Any, Capture]
    ) -> Capture:
        now = {
            name: replace(info, requires_grad=self.index.parameters[name].requires_grad)
            for name, info in self.parameters.items()
        }
        for name in self.plan.changed if self.plan is not None else ():
            if now[name].requires_grad:
                raise StrategyError(
                    f"parameter {name} was frozen when the plan was made, and forward changes it: "
                    "it cannot be trained too. Call autopar.compile after requires_grad_()."
                )

        def attempt(call: Call) -> Capture:
            if (key := call.key) in known:
                return known[key]
            with self.autocast():
                made = capture(
                    self.model,
                    call,
                    now,  # parameters may have been frozen since; their layouts stay the plan's
                    device=self.device,
                    differentiate=differentiate,
                    all_tangents=self.all_tangents,
                    loss_fn=self.options.loss_fn,
                    lifted=self.guards.lifted,
                )
            self.guards.add(made.reads, made.classes, made.variables, made.lifted)
            self.__dict__.pop("index", None)
            graph = replace(made.graph, parameters=self._planned(made.graph.parameters))
            known[key] = replace(made, graph=graph)
            return known[key]

        made = capture_slice(attempt, share.call, share.slices, local=self.options.local)
        if share.num_slices > 1:
            warn_of_local_writes(made, self.model)
        return made

    def _planned(self, captured: Iterable[str]) -> dict[str, ParameterInfo]:
        """The parameters of a graph, as the plan knows them.

        Raises:
            StrategyError: forward changes one in this call that the plan did not know of.
        """
        known = {name: self.parameters[name] for name in captured}
        changed = self.parameters.keys() - known.keys()
        if self.plan is not None and (new := sorted(changed - set(self.plan.changed))):
            raise StrategyError(
                f"forward changes the frozen parameter {new[0]}, and did not in the call that the "
                "plan was made for. Give autopar.compile example_inputs, in training mode."
            )
        return known

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The precision that the model is captured in."""
        if self.options.precision is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.options.precision)

    def without_autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Programs have their casts written in."""
        if not torch.is_autocast_enabled(self.device.type):
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, enabled=False)

    def call_key(self, share: BatchShard) -> tuple[Any, ...]:
        """What distinguishes a kind of call."""
        kind = self.device.type
        autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        modes = tuple(m.training for m in self.index.modules)
        called = (*share.call.key, share.global_rows, share.num_slices, share.in_time)
        trained = tuple(p.requires_grad for p in self.index.parameters.values())
        return (*called, autocast, modes, trained, self.all_tangents, self.guards.state)

    def differentiable_inputs(
        self, share: BatchShard
    ) -> tuple[tuple[Differentiable, ...], list[torch.Tensor]]:
        """What autograd is told that a call depends on: parameters held here, and inputs."""
        roles: list[Differentiable] = []
        tensors: list[torch.Tensor] = []
        for name, parameter in self.index.parameters.items():
            if parameter.requires_grad and not is_remote(parameter):
                roles.append(Parameter(name))
                tensors.append(parameter)
        for index, tensor in zip(share.call.tensor_indices, share.tensors, strict=True):
            if tensor.requires_grad:
                roles.append(Input(index))
                tensors.append(tensor)
        return tuple(roles), tensors

    def as_grad_of(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """A parameter's gradient around its local part."""
        parameter = self.index.parameters[name]
        return dtensor_like(gradient, parameter) if isinstance(parameter, DTensor) else gradient


@dataclass(frozen=True)
class ModuleIndex:
    """The modules and parameters of a model, and where its buffers are kept."""

    modules: tuple[nn.Module, ...]
    parameters: Mapping[str, nn.Parameter]
    buffer_owners: dict[str, tuple[nn.Module, str]]

    @staticmethod
    def of(model: nn.Module, carried: Iterable[tuple[str, str]]) -> ModuleIndex:
        """The modules, parameters and buffers; what is carried counts as buffers too."""
        places = {
            name: (model.get_submodule(module), key)
            for name, _ in model.named_buffers()
            for module, key in [attribute_of(name)]
        }
        for module, key in carried:
            places[f"{module}.{key}" if module else key] = (model.get_submodule(module), key)
        return ModuleIndex(tuple(model.modules()), dict(model.named_parameters()), places)

    def buffers(self) -> dict[str, torch.Tensor]:
        """The buffers as they are now: assigning to one replaces it."""
        found = {}
        for name, (module, key) in self.buffer_owners.items():
            buffer = module._buffers.get(key)
            found[name] = local_part(getattr(module, key)) if buffer is None else buffer
        return found
