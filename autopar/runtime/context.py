"""`ExecutionContext`: state that all calls of a module share, and their captures."""

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
from autopar.capture.batch_slices import capture_slice
from autopar.capture.call import BatchShard, Call
from autopar.capture.state.effects import attribute_of
from autopar.capture.state.guards import Guards
from autopar.capture.trace import Capture, capture
from autopar.errors import StrategyError
from autopar.ir.graph import ParameterInfo
from autopar.ir.roles import Differentiable, Input, Parameter
from autopar.plan.partition import NodeStrategies
from autopar.report.plan import Plan
from autopar.runtime.agreement.captured_graph import agree_on_graph
from autopar.runtime.agreement.consensus import run_on_all_ranks
from autopar.runtime.call_partitions import MakeStrategies, call_strategies
from autopar.runtime.codegen.program import LoweringOptions, with_axes
from autopar.runtime.options import Options
from autopar.runtime.parameters.compression_state import CompressionState
from autopar.runtime.parameters.distribute import is_remote, local_part
from autopar.runtime.process_groups import backend_of, rank
from autopar.runtime.rng import RandomStream
from autopar.runtime.written import warn_of_local_writes


@dataclass(frozen=True)
class ModuleIndex:
    """Modules, parameters and buffers of a model, cached between calls.

    Attributes:
        modules: all modules.
        parameters: all parameters, by name.
        buffer_owners: module and attribute of each buffer, by name.
    """

    modules: tuple[nn.Module, ...]
    parameters: Mapping[str, nn.Parameter]
    buffer_owners: Mapping[str, tuple[nn.Module, str]]

    @staticmethod
    def of(model: nn.Module, lifted: Iterable[tuple[str, str]]) -> ModuleIndex:
        """The index of a model; lifted attributes count as buffers."""
        owners = {
            name: (model.get_submodule(module), key)
            for name, _ in model.named_buffers()
            for module, key in [attribute_of(name)]
        }
        for module, key in lifted:
            owners[f"{module}.{key}" if module else key] = (model.get_submodule(module), key)
        return ModuleIndex(tuple(model.modules()), dict(model.named_parameters()), owners)

    def buffers(self) -> dict[str, torch.Tensor]:
        """The current buffers by name, looked up at each access since assignment replaces them."""
        found = {}
        for name, (module, key) in self.buffer_owners.items():
            buffer = module._buffers.get(key)
            found[name] = local_part(getattr(module, key)) if buffer is None else buffer
        return found


@dataclass
class ExecutionContext:
    """State that all calls of a module share.

    Attributes:
        model: the plain model.
        parameters: description of each parameter, by name.
        device: device of the tensors.
        options: options of capture and execution.
        rng: random stream of this rank.
        make_strategies: finds strategies for a call the plan does not cover.
        plan: the plan, None before it exists.
        mesh: mesh of the plan, None for one rank.
        groups: name of the process group of each axis and level, by axis name.
        unreduced_grads: local gradients of `no_sync` calls, by parameter name.
        compression_state: tensors that compression keeps between steps.
        captures: capture of each kind of call.
        planning_captures: captures made while planning, reused for all numbers of slices.
        all_tangents: whether every output may receive a gradient.
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
        """The index of the model."""
        return ModuleIndex.of(self.model, self.guards.lifted)

    @cached_property
    def guards(self) -> Guards:
        """The Python state that captures depend on."""
        return Guards(self.model, self.parameters)

    def index_model(self) -> None:
        """Drops the index if the model has changed; runs before every call."""
        if self.guards.update():
            self._drop_index()

    def reindex_model(self) -> None:
        """Drops the index and guards after parameters were replaced."""
        self._drop_index()
        self.guards.invalidate()

    def _drop_index(self) -> None:
        self.__dict__.pop("index", None)

    def write_buffers(self, updates: Mapping[str, torch.Tensor], rebound: frozenset[str]) -> None:
        """Writes new values of buffers, in place or as new tensors.

        Args:
            updates: new values, by name of the buffer or lifted attribute.
            rebound: names to which forward assigns a new tensor.
        """
        buffers = self.index.buffers()
        with torch.no_grad():
            for name, value in updates.items():
                if name in rebound:
                    module, key = self.index.buffer_owners[name]
                    owner = module._buffers if key in module._buffers else vars(module)
                    self.guards.rebind(owner, key, value.clone())
                else:
                    buffers[name].copy_(value)

    def capture(self, shard: BatchShard, for_planning: bool = False) -> Capture:
        """Captures a call, with its backward if gradients are enabled or for planning."""
        differentiate = for_planning or torch.is_grad_enabled()
        key = (*self.call_key(shard), differentiate)
        if key not in self.captures:
            self.guards.check_current()
            known = self.planning_captures if for_planning else {}
            made = self._capture(shard, differentiate, known)
            key = (*self.call_key(shard), differentiate)  # capturing may extend the guarded state
            self.captures[key] = made
        return self.captures[key]

    def capture_on_all_ranks(self, shard: BatchShard) -> Capture:
        """Captures a call on every rank at once and compares the graphs.

        Raises:
            DisagreementError: the ranks' forward or loss_fn compute different things.
        """
        captured = run_on_all_ranks(lambda: self.capture(shard))
        even = not self.options.local or shard.slices.is_even
        agree_on_graph(captured.captured_graph, even=even)
        return captured

    def _capture(
        self, shard: BatchShard, differentiate: bool, known: dict[Any, Capture]
    ) -> Capture:
        parameters = self._current_parameters()

        def capture_call(call: Call) -> Capture:
            if (key := call.key) in known:
                return known[key]
            with self.autocast():
                made = capture(
                    self.model,
                    call,
                    parameters,
                    device=self.device,
                    differentiate=differentiate,
                    all_tangents=self.all_tangents,
                    loss_fn=self.options.loss_fn,
                    lifted=self.guards.lifted,
                )
            self.guards.add(made.reads, made.classes, made.variables, made.lifted)
            self._drop_index()
            graph = replace(made.graph, parameters=self._planned(made.graph.parameters))
            known[key] = replace(made, graph=graph)
            return known[key]

        made = capture_slice(capture_call, shard.call, shard.slices, local=self.options.local)
        if shard.num_slices > 1:
            warn_of_local_writes(made, self.model)
        return made

    def _current_parameters(self) -> dict[str, ParameterInfo]:
        """The parameters as planned, with their current `requires_grad`.

        Raises:
            StrategyError: a parameter that forward changes now requires gradients.
        """
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
        return now

    def _planned(self, captured: Iterable[str]) -> dict[str, ParameterInfo]:
        """The parameters of a captured graph as the plan describes them.

        Raises:
            StrategyError: forward changes a parameter in this call that the plan left constant.
        """
        known = {name: self.parameters[name] for name in captured}
        changed = self.parameters.keys() - known.keys()
        if self.plan is not None and (new := sorted(changed - set(self.plan.changed))):
            raise StrategyError(
                f"forward changes the frozen parameter {new[0]}, and did not in the call that the "
                "plan was made for. Give autopar.compile example_inputs, in training mode."
            )
        return known

    def op_strategies(self, captured: Capture, shard: BatchShard) -> tuple[NodeStrategies, ...]:
        """The strategies of a call for each partitioned axis; all ranks call this at once."""
        assert self.plan is not None
        return call_strategies(
            with_axes(captured.graph, self.plan),
            self.plan,
            rank(),
            shard.global_rows,
            shard.num_slices,
            self.make_strategies,
        )

    def lowering_options(self, no_sync: bool, unreduced: tuple[str, ...]) -> LoweringOptions:
        """Options of lowering on this rank.

        Args:
            no_sync: whether gradients stay unreduced.
            unreduced: names of parameters with unreduced gradients of earlier calls.
        """
        assert self.plan is not None
        return LoweringOptions(
            self.plan,
            rank(),
            backend_of(self.device),
            self.groups,
            self.options.backend,
            no_sync,
            unreduced,
        )

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The autocast context that the model is captured in."""
        if self.options.precision is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.options.precision)

    def without_autocast(self) -> contextlib.AbstractContextManager[Any]:
        """A context for programs, whose casts are captured already."""
        if not torch.is_autocast_enabled(self.device.type):
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, enabled=False)

    def call_key(self, shard: BatchShard) -> tuple[Any, ...]:
        """Everything that distinguishes a kind of call."""
        device = self.device.type
        autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        modes = tuple(m.training for m in self.index.modules)
        called = (*shard.call.key, shard.global_rows, shard.num_slices, shard.in_time)
        trained = tuple(p.requires_grad for p in self.index.parameters.values())
        return (*called, autocast, modes, trained, self.all_tangents, self.guards.state)

    def differentiable_inputs(
        self, shard: BatchShard
    ) -> tuple[tuple[Differentiable, ...], list[torch.Tensor]]:
        """Local parameters and inputs that autograd differentiates a call by."""
        roles: list[Differentiable] = []
        tensors: list[torch.Tensor] = []
        for name, parameter in self.index.parameters.items():
            if parameter.requires_grad and not is_remote(parameter):
                roles.append(Parameter(name))
                tensors.append(parameter)
        for index, tensor in zip(shard.call.tensor_indices, shard.tensors, strict=True):
            if tensor.requires_grad:
                roles.append(Input(index))
                tensors.append(tensor)
        return tuple(roles), tensors

    def as_grad_of(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """A local gradient in the layout of its parameter."""
        parameter = self.index.parameters[name]
        return dtensor_like(gradient, parameter) if isinstance(parameter, DTensor) else gradient
