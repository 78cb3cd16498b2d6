"""`ExecutionContext`: state that all calls of a module share, and their captures."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from time import perf_counter
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar._torch import pytree
from autopar.capture.batch_slices import capture_slice
from autopar.capture.call import BatchShard, Call
from autopar.capture.shape_family import ShapeFamily
from autopar.capture.state.contents import attribute_of
from autopar.capture.state.effects import CounterValue
from autopar.capture.state.guards import Guards
from autopar.capture.symbolic_sizes import kind_of
from autopar.capture.trace import Capture, capture, capture_symbolically
from autopar.core.common.bounded_cache import BoundedCache
from autopar.core.common.groups import backend_of
from autopar.core.common.notices import warn_once
from autopar.core.common.world import rank
from autopar.core.ir.graph import ParameterInfo
from autopar.core.plan.layout import Layout
from autopar.core.plan.partition import (
    NodeStrategies,
)
from autopar.core.plan.plan import Plan
from autopar.errors import AutoparWarning, StrategyError
from autopar.runtime.agreement.captured_graph import agree_on_graph
from autopar.runtime.agreement.consensus import (
    run_on_all_ranks,
)
from autopar.runtime.agreement.graph_order import in_order_of_rank0
from autopar.runtime.agreement.strategies import (
    MakeStrategies,
    PlannedStrategies,
    agreed_strategies,
)
from autopar.runtime.agreement.transforms import tell_of_modes
from autopar.runtime.agreement.turn import Turn
from autopar.runtime.border.held_gradients import HeldGradients, mesh_of_plain_sums
from autopar.runtime.border.local_writes import warn_of_local_writes
from autopar.runtime.border.outside_gradients import OutsideGradients
from autopar.runtime.codegen.program import LoweringOptions, compiler_for, with_axes
from autopar.runtime.options import Options
from autopar.runtime.parameters.compression_state import CompressionState
from autopar.runtime.parameters.distribute import is_remote, local_part
from autopar.runtime.parameters.remote import as_remote
from autopar.runtime.parameters.sharded import in_layout_of
from autopar.runtime.parameters.shared_memory import check_given_memory
from autopar.runtime.rng import RandomStream

MANY_SHAPES = 8
"""Shapes of calls beyond which a warning says how to have fewer."""

_training, _requires_grad = attrgetter("training"), attrgetter("requires_grad")


@dataclass(frozen=True)
class ModuleIndex:
    """Modules, parameters and buffers of a model, cached between calls."""

    modules: tuple[nn.Module, ...]
    parameters: Mapping[str, nn.Parameter]
    buffer_owners: Mapping[str, tuple[nn.Module, str]]  # module and attribute

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

    @cached_property
    def local(self) -> dict[str, nn.Parameter]:
        """The parameters on this rank."""
        return {name: p for name, p in self.parameters.items() if not is_remote(p)}

    @cached_property
    def dtensors(self) -> frozenset[str]:
        """Names of the parameters that are DTensors."""
        return frozenset(n for n, p in self.parameters.items() if isinstance(p, DTensor))

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
        mesh: mesh of the plan, None for one rank.
        groups: name of the process group of each axis and level, by axis name.
        world: process group of all ranks, for pipelines; None for the default one.
        held_gradients: gradients of calls inside `no_sync`.
        outside_gradients: gradients that the loop computes beside calls.
        captures: capture of each kind of call.
        planning_captures: captures made while planning, reused for all numbers of slices.
        all_tangents: whether every output may receive a gradient.
        shapes: shapes of the calls that have had a program.
        families: captures of calls that differ in sizes alone, by kind of call.
        last_capture: capture of the latest call, None after one without a program.
        turn: lets one thread at a time into calls.
        announce: agrees with the other ranks on an event of the latest call.
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
    world: dist.ProcessGroup | None = None
    held_gradients: HeldGradients = field(default_factory=HeldGradients)
    outside_gradients: OutsideGradients = field(default_factory=OutsideGradients)
    compression_state: CompressionState = field(default_factory=CompressionState)
    captures: BoundedCache[Capture] = field(default_factory=BoundedCache)
    planning_captures: dict[Any, Capture] = field(default_factory=dict)
    all_tangents: bool = False
    shapes: set[Any] = field(default_factory=set)
    families: BoundedCache[ShapeFamily] = field(default_factory=BoundedCache)
    last_capture: Capture | None = None
    turn: Turn = field(default_factory=Turn)
    announce: Callable[[str], None] = lambda event: None

    @cached_property
    def graph_pool(self) -> Any:
        """Memory of the CUDA graphs of all programs, which run one after another."""
        return torch.cuda.graph_pool_handle()

    @cached_property
    def index(self) -> ModuleIndex:
        return ModuleIndex.of(self.model, self.guards.lifted)

    @cached_property
    def guards(self) -> Guards:
        return Guards(self.model, self.parameters)

    @property
    def stage(self) -> int:
        """This rank's index along the pipeline, 0 without one."""
        return Layout(self.plan).coordinate(rank()).get("pp", 0) if self.plan is not None else 0

    def index_model(self) -> None:
        """Drops the index if the model has changed; runs before every call."""
        tell_of_modes()
        if self.guards.update():
            self.__dict__.pop("index", None)
        check_given_memory(self.index.local.items())

    @property
    def trained_here(self) -> dict[str, bool]:
        """Whether each parameter on this rank is trained, by name."""
        return {name: p.requires_grad for name, p in self.index.local.items()}

    def train_remote(self, trained: Mapping[str, bool]) -> None:
        """Sets `requires_grad` of remote parameters as on the ranks that hold them."""
        for name, flag in trained.items():
            parameter = self.index.parameters[name]
            if is_remote(parameter) and parameter.requires_grad != flag:
                parameter.requires_grad_(flag)

    def reindex_model(self) -> None:
        """Drops the index and guards after parameters were replaced."""
        self.__dict__.pop("index", None)
        self.guards.invalidate()
        self.outside_gradients.watch(self.index.local, self.options, self.plan)

    def write_buffers(self, updates: Mapping[str, torch.Tensor], rebound: frozenset[str]) -> None:
        """Writes new values of buffers in place, or as new tensors where forward assigns one."""
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
        if (made := self.captures.get(key)) is not None:
            return made
        self.guards.check_current()
        known = self.planning_captures if for_planning else {}
        made = self._capture(shard, differentiate, known)
        key = (*self.call_key(shard), differentiate)  # capturing may extend the guarded state
        return self.captures.add(key, made, MANY_SHAPES)

    def capture_on_all_ranks(self, shard: BatchShard) -> Capture:
        """Captures a call on every rank at once; raises DisagreementError if the graphs differ."""
        captured = run_on_all_ranks(lambda: self.capture(shard))
        whole = in_order_of_rank0(captured.captured_graph)
        is_whole = captured.graph is captured.captured_graph
        graph = whole if is_whole else in_order_of_rank0(captured.graph)
        captured = replace(captured, graph=graph, captured_graph=whole)
        options, is_even = self.options, shard.slices.is_even
        even = not options.ragged and (not options.local or is_even)
        agree_on_graph(captured.captured_graph, even=even)
        return captured

    def _capture(
        self, shard: BatchShard, differentiate: bool, known: dict[Any, Capture]
    ) -> Capture:
        def capture_call(call: Call) -> Capture:
            if call.key in known:
                return known[call.key]
            begin, options = perf_counter(), self.capture_options(differentiate)
            key = kind_of(call), differentiate, *self.mode_key
            family = self.families.get(key) or self.families.add(key, ShapeFamily(), MANY_SHAPES)
            with self.autocast():
                made = family.capture(
                    call,
                    lambda call: capture(self.model, call, **options),
                    lambda call, sizes, compiled: capture_symbolically(
                        self.model, call, sizes=sizes, compiled=compiled, **options
                    ),
                )
            self.guards.add(made.reads, made.classes, made.variables, made.lifted, made.backward)
            self.__dict__.pop("index", None)
            graph = replace(made.graph, parameters=self._planned(made.graph.parameters))
            capture_s = perf_counter() - begin
            made = replace(made, graph=graph, traced=made.graph, call=call, capture_s=capture_s)
            known[call.key] = made
            return made

        made = capture_slice(
            capture_call,
            shard.call,
            shard.slices,
            local=self.options.local,
            gathers_rows=self.options.is_replicated and not shard.call.derivatives,
            proves_rows=self.options.batch == "local"
            and self.options.rows is None
            and not shard.call.derivatives,  # the call itself was proved
        )
        if shard.slices.count > 1:
            warn_of_local_writes(made, self.model)
        return made

    def capture_options(self, differentiate: bool) -> dict[str, Any]:
        """Keyword arguments of `capture` and its like."""
        return {
            "parameters": self._current_parameters(),
            "device": self.device,
            "differentiate": differentiate,
            "all_tangents": self.all_tangents,
            "loss_fn": self.options.loss_fn,
            "lifted": self.guards.lifted,
        }

    def _current_parameters(self) -> dict[str, ParameterInfo]:
        """The parameters as planned, with their current `requires_grad`."""
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
        """The parameters of a captured graph as the plan describes them."""
        known = {name: self.parameters[name] for name in captured}
        changed = self.parameters.keys() - known.keys()
        if self.plan is not None and (new := sorted(changed - set(self.plan.changed))):
            raise StrategyError(
                f"forward changes the frozen parameter {new[0]}, and did not in the call that the "
                "plan was made for. Give autopar.compile example_inputs, in training mode."
            )
        return known

    def op_strategies(
        self, captured: Capture, shard: BatchShard, planned: PlannedStrategies | None = None
    ) -> tuple[NodeStrategies, ...]:
        """The strategies of a call for each partitioned axis; see `agreed_strategies`."""
        assert self.plan is not None
        graph = with_axes(captured.graph, self.plan)
        return agreed_strategies(graph, self.plan, shard, self.make_strategies, planned)

    def lowering_options(self, no_sync: bool, unreduced: tuple[str, ...]) -> LoweringOptions:
        assert self.plan is not None
        backend, compiler = backend_of(self.device), compiler_for(self.plan, self.options.backend)
        return LoweringOptions(
            self.plan, rank(), backend, self.groups, compiler, no_sync, unreduced
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
        slices = shard.slices
        called = (*shard.call.key, slices.rows, slices.count, slices.over_time, slices.held)
        return (*self.mode_key, *called)

    @property
    def mode_key(self) -> tuple[Any, ...]:
        """Everything that distinguishes kinds of call but the arguments; `modes` come first."""
        return self.modes, self.all_tangents, self.guards.state, self.options.local

    @property
    def modes(self) -> tuple[Any, ...]:
        """Autocast, and what is trained."""
        device = self.device.type
        autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        modes = tuple(map(_training, self.index.modules))
        return autocast, modes, tuple(map(_requires_grad, self.index.parameters.values()))

    def differentiable_inputs(self, shard: BatchShard) -> dict[str | int, torch.Tensor]:
        """Parameters by name and inputs by index that autograd differentiates a call by."""
        found: dict[str | int, torch.Tensor] = {
            name: p for name, p in self.index.parameters.items() if p.requires_grad
        }
        return found | {index: x for index, x in inputs_of(shard).items() if x.requires_grad}

    def result_of(
        self, capture: Capture, returned: Sequence[int], outputs: Sequence[torch.Tensor]
    ) -> Any:
        """A call's result from its tensors; writes the attributes that forward assigns."""
        self.last_capture = capture
        leaves = [
            x.before_writes(self.model) if isinstance(x, CounterValue) else x
            for x in capture.leaves
        ]
        for index, value in zip(returned, outputs, strict=True):
            leaves[index] = value
        result = pytree.tree_unflatten(leaves, capture.structure)
        if capture.writes:
            result, values = result
            for write, value in zip(capture.writes, values, strict=True):
                write.apply(self.model, value)
        return result

    def tell_of_shapes(self, shard: BatchShard) -> None:
        """Warns once programs were made for more than MANY_SHAPES shapes of calls."""
        self.shapes.add((shard.call.key, shard.slices.rows))
        if len(self.shapes) == MANY_SHAPES + 1:
            specs = [shard.call.leaves[i] for i in shard.call.tensor_indices]
            shapes = ", ".join(str(tuple(spec.shape)) for spec in specs[:3])
            warn_once(
                AutoparWarning,
                f"{type(self.model).__name__} was called with more than {MANY_SHAPES} shapes, the "
                f"last of them {shapes} on this rank. Each has a program, which takes time to "
                f"compile; the last {self.options.max_programs} used are kept "
                "(autopar.compile(max_programs=)). Round lengths up with autopar.pad_to_bucket, or "
                "use a fixed length, and leave out the last small batch (drop_last=True).",
            )

    def hold(self, name: str, gradient: torch.Tensor) -> None:
        """Holds back this rank's gradient of a parameter."""
        self.held_gradients.mesh = mesh_of_plain_sums(self.plan, self.mesh)
        self.held_gradients.add(name, self.index.parameters[name], gradient)

    def as_grad_of(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        parameter = self.index.parameters[name]
        return as_remote(in_layout_of(parameter, gradient), parameter)


def inputs_of(shard: BatchShard) -> dict[int, torch.Tensor]:
    """The tensors among a call's arguments, by index."""
    return dict(zip(shard.call.tensor_indices, shard.tensors, strict=True))


@functools.lru_cache(maxsize=64)
def cached_scalar(value: float, device: torch.device) -> torch.Tensor:
    """A float64 on a device, copied there once; programs do not change their inputs."""
    return torch.tensor(value, dtype=torch.float64, device=device)


def batch_fraction(shard: BatchShard, device: torch.device) -> torch.Tensor:
    """The fraction of the global batch in a shard, as float64."""
    return cached_scalar(shard.rows / shard.slices.rows, device)
