"""`PlannedModule`: a model with its plan, mesh and executor."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MethodType
from typing import Any, Self

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar._torch import pytree
from autopar.capture.call import BatchShard, batch_shard_of
from autopar.capture.trace import Capture
from autopar.core.common.world import rank, running_ranks
from autopar.core.ir.graph import ParameterInfo
from autopar.core.ir.mesh_levels import DATA_AXIS
from autopar.core.ir.placement import Shard
from autopar.core.plan.layout import Layout
from autopar.core.plan.plan import Plan
from autopar.errors import CaptureError, StrategyError
from autopar.runtime.agreement.consensus import run_on_all_ranks
from autopar.runtime.agreement.strategies import MakeStrategies
from autopar.runtime.agreement.turn import Turn
from autopar.runtime.codegen.surroundings import apart_from_hooks
from autopar.runtime.context import ExecutionContext
from autopar.runtime.execution import Execution, MakeFallback, MakePlan
from autopar.runtime.fallback import check_runs
from autopar.runtime.group_cache import group_of
from autopar.runtime.initialization.deferred import DeferredValues
from autopar.runtime.initialization.initialize import InitFunction
from autopar.runtime.options import Options
from autopar.runtime.parameters.compression_state import CompressionState
from autopar.runtime.parameters.distribute import (
    as_dtensors,
    broadcast_from_rank0,
    local_part,
    parameter_like,
)
from autopar.runtime.parameters.offloaded import store_parameters
from autopar.runtime.parameters.sharded import in_layout_of
from autopar.runtime.pipeline.stage_parameters import distribute_plan_parameters, stage_mesh
from autopar.runtime.process_groups import make_groups, make_mesh
from autopar.runtime.rng import RandomStream, keep_random_state
from autopar.runtime.tracing.compiler_branches import warn_of_branches
from autopar.runtime.user_class import specialized

OWN = frozenset((*vars(nn.Module()), "_wrapped", "_execution"))
"""Attributes of the wrapper itself: what torch gives every module, and two of its own."""


class PlannedModule(nn.Module):
    """A model with its plan, mesh and executor; other attributes are the model's."""

    def __new__(
        cls, model: nn.Module | None = None, parameters: Any = (), device: Any = None, *rest: Any
    ) -> Self:
        """An instance of a subclass with the signature of the model's forward."""
        if model is None:
            return super().__new__(cls)
        has_loss = any(isinstance(x, Options) and x.loss_fn is not None for x in rest)
        return super().__new__(specialized(cls, model, has_loss=has_loss))

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of the user's model, for `isinstance`; `type` is a subclass of this one."""
        wrapped = self.__dict__.get("_wrapped")
        return type(wrapped[0]) if wrapped else type(self)

    def _get_name(self) -> str:
        return type(self).__name__

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, ParameterInfo],
        device: torch.device,
        options: Options,
        make_plan: MakePlan,
        make_fallback: MakeFallback,
        make_strategies: MakeStrategies,
    ) -> None:
        super().__init__()
        self._wrapped: tuple[nn.Module, ...] = (model,)  # a tuple, so that it is no submodule
        for table in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[table] = getattr(model, table)
        self.training = model.training
        stream = RandomStream(options, device)
        context = ExecutionContext(
            model, dict(parameters), device, options, stream, make_strategies
        )
        self._execution = Execution.of(context, make_plan, make_fallback)

    @property
    def plan(self) -> Plan | None:
        """The plan; None until the first call if there were no example inputs."""
        return self._context.plan

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh of the plan; None without one, and for one rank."""
        return self._context.mesh

    @property
    def _context(self) -> ExecutionContext:
        return self._execution.context

    @property
    def _turn(self) -> Turn:
        return self._context.turn

    @property
    def user_module(self) -> nn.Module:
        """The module that was compiled; its parameters are those of this rank."""
        return self._wrapped[0]

    @property
    def is_planned(self) -> bool:
        """Whether parameters lie as they stay, under a plan or the fallback."""
        return self.plan is not None or self._execution.fallback is not None

    @property
    def _options(self) -> Options:
        return self._context.options

    def broadcast_parameters(
        self, *, replicated_dtensors: bool, init_fn: InitFunction | None = None
    ) -> None:
        """Broadcasts values from rank 0; those on another device, or none yet, are deferred."""
        device = self._context.device
        self._execution.deferred = DeferredValues.of(self._wrapped[0], device, init_fn)
        if self._options.ranks == 1:
            return
        broadcast_from_rank0([*self.parameters(), *self.buffers()])
        if replicated_dtensors:
            mesh = make_mesh(self._context.device, ((DATA_AXIS, self._options.ranks),))
            assert mesh is not None
            as_dtensors(self, mesh)
        self._context.reindex_model()

    def materialize_parameters(self) -> None:
        """Gives parameters and buffers without values their values; all ranks call this at once.

        The first call and `state_dict` do this by themselves. Without a plan, each rank gets the
        whole model.

        Raises:
            ModelError: on every rank, naming tensors that no module initialises.
        """
        if self._execution.deferred is None:
            return
        if self._execution.protocol is not None:
            self._execution.protocol.agree_on_values()
        deferred = self._execution.deferred
        for load in deferred.loads:
            load()
        deferred.loads.clear()
        deferred.give_values(self.plan, self.mesh)
        self._execution.deferred = None
        self._context.reindex_model()

    def make_room(self, shapes: Mapping[str, torch.Size]) -> None:
        """Allocates this rank's parts of tensors without values, to load values of these shapes."""
        if self._execution.deferred is not None:
            held = Layout(self.plan).parameters_on(rank()) if self.plan is not None else None
            self._execution.deferred.make_room(shapes, held)
            store_parameters(self._wrapped[0].parameters(), self.plan)
            self._context.reindex_model()

    def load_values_of(self, shapes: Mapping[str, torch.Size], load: Callable[[], object]) -> None:
        """Runs `load`, which fills tensors of these shapes, as soon as the shards are known."""

        def load_now() -> None:
            self.make_room(shapes)
            load()

        if self._execution.deferred is not None and self.plan is None:
            self._execution.deferred.loads.append(load_now)
        else:
            load_now()

    def plan_for(self, leaves: list[Any], structure: Any) -> None:
        """Plans for the arguments of a call, or falls back to torch's data parallelism."""
        # a plan is for training, though the first call may be an evaluation
        with torch.enable_grad(), apart_from_hooks():
            self._plan_for_training(leaves, structure)

    def _plan_for_training(self, leaves: list[Any], structure: Any) -> None:

        def first_rows(
            model_parallel_size: int, pp_size: int, micro_batches: int, even: bool = False
        ) -> BatchShard:
            options = replace(
                self._options, model_parallel_size=model_parallel_size, pp_size=pp_size
            )
            shard = self._batch_shard(leaves, structure, options, strict=True)
            return shard.split_micro_batches(micro_batches, even)[0]

        def capture(*sizes: Any) -> Capture:
            return self._context.capture(first_rows(*sizes), for_planning=True)

        try:
            call = pytree.tree_unflatten(leaves, structure)
            with keep_random_state(self._context.device):
                plan = self._execution.make_plan(self, capture, call)
                micro_batches = plan.pipeline.micro_batches if plan.pipeline else 1
                sizes = plan.model_parallel_size, plan.pp_size, micro_batches
                warn_of_branches(self._context, first_rows(*sizes), capture(*sizes))
            self.apply_plan(plan)
        except CaptureError as error:
            if self._execution.argument_values.explain(error, self._context, leaves, structure):
                return self._plan_for_training(leaves, structure)
            self._check_runs(leaves, structure, error)
            self.materialize_parameters()
            # ranks with equal rows have equal weights, so means stay the same
            self._context.options = replace(self._options, model_parallel_size=1, pp_size=1)
            with keep_random_state(self._context.device):
                self._execution.fallback = self._execution.make_fallback(self._wrapped[0], error)
            self._context.outside_gradients.stop()
            self._context.reindex_model()

    def apply_plan(self, plan: Plan) -> None:
        """Makes the mesh of a plan, distributes the parameters and makes the executor."""
        context = self._context
        options = replace(
            self._options,
            model_parallel_size=plan.model_parallel_size,
            pp_size=plan.pp_size,
            row_shares=plan.row_shares,
        )
        if options != self._options:
            context.options, context.rng = options, RandomStream(options, context.device)
        layout = Layout(plan)
        mesh = make_mesh(context.device, layout.storage, ("pp", *layout.shard_order))
        context.groups = make_groups(context.device, layout.axes, mesh)
        if plan.pp_size > 1:
            ranks = tuple(running_ranks(range(plan.world_size)))
            context.world = group_of(context.device, (ranks,))
        with keep_random_state(context.device):  # sharding by DTensor draws from it
            run_on_all_ranks(lambda: distribute_plan_parameters(self._wrapped[0], plan, mesh))
            run_on_all_ranks(lambda: store_parameters(self._wrapped[0].parameters(), plan))
        context.plan = plan
        context.reindex_model()
        context.planning_captures.clear()
        context.mesh = mesh
        context.compression_state = CompressionState.of_plan(
            plan, context.parameters, rank(), context.device
        )
        if self._execution.pending_compression_state is not None:
            self._load_compression_state(self._execution.pending_compression_state)
            self._execution.pending_compression_state = None
        context.guards.lift(plan.changed)
        self._execution.start()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_wrapped":
                raise
            value = getattr(self._wrapped[0], name)
            if isinstance(value, MethodType) and value.__self__ is self._wrapped[0]:
                return self._method(name, value)
            # models of transformers return the device of their first parameter
            is_meta = isinstance(value, torch.device) and value.type == "meta"
            return self._context.device if is_meta else value

    def _method(self, name: str, method: MethodType) -> Any:
        """A method of the user's module, as the compiled one offers it."""
        return method

    def __copy__(self) -> Self:
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises StrategyError, since process groups and programs cannot be pickled."""
        raise StrategyError(
            "a compiled model cannot be pickled, by torch.save or otherwise. Save "
            "model.state_dict(), with torch.save or torch.distributed.checkpoint, and load it into "
            "a model that was compiled again."
        )

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute of the model, unless it is one of the wrapper's own."""
        if name in OWN or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(self._wrapped[0], name, value)

    def __delattr__(self, name: str) -> None:
        if name in OWN or hasattr(type(self), name):
            super().__delattr__(name)
        else:
            delattr(self._wrapped[0], name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy with its own parameters under the same plan, such as an average of weights."""
        self.materialize_parameters()
        return self._copy(memo)

    def _copy(self, memo: dict[int, Any]) -> Self:
        made = memo[id(self)] = type(self).__new__(type(self))
        for parameter in self._wrapped[0].parameters():
            if isinstance(parameter, DTensor) and id(parameter) not in memo:
                part = local_part(parameter.detach()).clone()  # without gradient, as torch's copies
                memo[id(parameter)] = parameter_like(parameter, in_layout_of(parameter, part))
        for name, value in self.__dict__.items():
            if name != "_execution":
                # one of the hooks may be a method of a whole training loop
                is_table = name.endswith("_hooks")
                made.__dict__[name] = value.copy() if is_table else copy.deepcopy(value, memo)
        made._execution = self._execution.copy_for(made._wrapped[0], memo)
        return made

    def copy_with_plan(self, plan: Plan) -> Self:
        """A copy of an unplanned module, with its own parameters, that tries a plan.

        Parameters that the plan shards or drops are not copied whole.
        """
        pipeline, model, layout = plan.pipeline, self._wrapped[0], Layout(plan)
        local = pipeline.held(layout.coordinate(rank()).get("pp", 0)) if pipeline else ()
        memo: dict[int, Any] = {}
        for name, parameter in model.named_parameters():
            dropped = plan.pp_size > 1 and name not in {*local, *plan.changed}
            placements = layout.of(name).values() if layout.shards_parameters else ()
            if dropped or any(isinstance(placement, Shard) for placement in placements):
                memo[id(parameter)] = parameter_like(parameter, parameter.detach())
        made = run_on_all_ranks(lambda: self._copy(memo))
        made._context.options = replace(made._options, recorder=None, on_trial=True)
        made.apply_plan(plan)
        if self._execution.deferred is not None:
            self._execution.deferred.for_copy(made._wrapped[0]).fill(layout.parameters_on(rank()))
            made._context.reindex_model()
        return made

    def _check_runs(self, leaves: list[Any], structure: Any, reason: CaptureError) -> None:
        model, loss_fn, autocast = self._wrapped[0], self._options.loss_fn, self._context.autocast()
        run_on_all_ranks(lambda: check_runs(model, leaves, structure, loss_fn, autocast, reason))

    def _batch_shard(
        self,
        leaves: list[Any],
        structure: Any,
        options: Options | None = None,
        strict: bool = False,
    ) -> BatchShard:
        options = options or self._options
        shard = batch_shard_of(
            leaves,
            structure,
            mode=options.batch,
            rank=options.dp_rank(rank()),
            ranks=options.dp_size,
            static=options.static,
            shares=options.row_shares,
            stated=options.rows,
            strict=strict,
            undivided=options.undivided,
        )
        if self._execution.fallback is not None:
            return shard
        return self._execution.argument_values.answer(shard, self._context, leaves, structure)

    def _load_compression_state(self, values: Mapping[str, Any] | None) -> None:
        if self.plan is None:
            self._execution.pending_compression_state = values
        elif self._context.compression_state.tensors and self.mesh is not None:
            self._context.compression_state.load(values or {}, self._stage_mesh)

    @property
    def _stage_mesh(self) -> DeviceMesh:
        """The mesh of the ranks that share this rank's stage."""
        assert self.mesh is not None
        assert self.plan is not None
        return stage_mesh(self.mesh) if self.plan.pp_size > 1 else self.mesh


def check_not_compiled(model: nn.Module) -> None:
    """Raises StrategyError if autopar has compiled a model, or a module in it, before."""
    for name, module in model.named_modules():
        if isinstance(module, PlannedModule):
            where = f"its submodule {name}" if name else "this model"
            raise StrategyError(
                f"{where} was compiled by autopar.compile before: compile the plain model once."
            )
