"""`DistributedModule`: the model as the user trains it."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar._torch import pytree
from autopar.capture.batch_shards import BatchShard, batch_shard_of
from autopar.capture.call import TensorSpec
from autopar.capture.trace import Capture
from autopar.common.containers import check_no_hidden_tensors, flatten
from autopar.errors import CaptureError
from autopar.ir.graph import ParameterInfo
from autopar.ir.mesh_levels import DATA_AXIS
from autopar.report.plan import Plan
from autopar.runtime.agreement.channel import finish_exchange
from autopar.runtime.agreement.consensus import run_on_all_ranks
from autopar.runtime.agreement.optimizer_steps import OptimizerSteps
from autopar.runtime.agreement.protocol import CallState, Protocol
from autopar.runtime.agreement.replicas import Replicas, compare_replicas
from autopar.runtime.attributes import ModelAttributes
from autopar.runtime.blame import check_runs
from autopar.runtime.call_partitions import MakeStrategies
from autopar.runtime.context import ExecutionContext
from autopar.runtime.fallback import average_over_batch, explaining_row_errors
from autopar.runtime.options import Options
from autopar.runtime.parameters.clip_grad import clip_grad_norm
from autopar.runtime.parameters.compression_state import STATE_DICT_KEY, CompressionState
from autopar.runtime.parameters.distribute import (
    as_dtensors,
    broadcast_from_rank0,
    distribute_like,
    is_remote,
)
from autopar.runtime.pipeline.executor import PipelineExecutor
from autopar.runtime.pipeline.stage_parameters import (
    distribute_plan_parameters,
    fetch_remote_parameters,
    stage_mesh,
)
from autopar.runtime.process_groups import make_groups, make_mesh, rank
from autopar.runtime.rng import stream_of
from autopar.runtime.spmd.executor import SpmdExecutor

CaptureFunction = Callable[[int, int, int], Capture]
"""Captures what a rank does of a call, given how many ranks the model itself is partitioned over,
how many its stages lie on, and into how many micro-batches the rows of a rank are cut."""
MakePlan = Callable[["DistributedModule", CaptureFunction, Any], Plan]
"""Plans a call of a module: its arguments and keyword arguments."""
MakeFallback = Callable[[nn.Module, CaptureError], nn.Module]
CheckCall = Callable[["DistributedModule", list[Any], Any], None]
"""Looks at the module and the flattened arguments of a call before it runs, or raises."""


class DistributedModule(ModelAttributes):
    """A model that runs its share of every call under a plan.

    It has the parameters, buffers, submodules, names and attributes of the model it was made
    from, and is used as that would be. Parameters that the plan shards are DTensors.

    Attributes:
        plan: the plan; None until the first call if there were no example inputs.
        mesh: the DeviceMesh of the plan; None for one rank.
        before_training: runs once, before the first call with gradients, under the plan.
    """

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
        self._wrapped = (model,)
        for table in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[table] = getattr(model, table)
        self.training = model.training
        self._device, self._options, self._make_plan = device, options, make_plan
        self._make_fallback = make_fallback
        self._fallback: tuple[nn.Module, ...] = ()
        self.plan: Plan | None = None
        self.mesh: DeviceMesh | None = None
        self._no_sync = False
        self._pending_compression_state: Mapping[str, Any] | None = None
        self.before_first_training_call: CheckCall | None = None
        infos, stream = dict(parameters), stream_of(options, device)
        self._context = ExecutionContext(model, infos, device, options, stream, make_strategies)
        self._protocol = Protocol.of(model)
        self._executor: SpmdExecutor | PipelineExecutor | None = None

    # What a training script asks of it.

    @property
    def data_parallel_size(self) -> int:
        """Among how many ranks the rows of a batch are divided."""
        return self._options.dp_size

    @property
    def data_parallel_rank(self) -> int:
        """Which of these ranks this one is; ranks that share a model are the same one."""
        return self._options.dp_rank(rank())

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Calls inside keep their gradients on this rank; the next call outside adds and reduces.

        While gradients are held back, `.grad` is not changed.
        """
        inner = self._fallback[0] if self._fallback else None
        before, self._no_sync = self._no_sync, self._options.dp_size > 1
        try:
            with getattr(inner, "no_sync", contextlib.nullcontext)():
                yield
        finally:
            self._no_sync = before

    @property
    def rng_state(self) -> torch.Tensor:
        """State of this rank's random stream (dropout); save and restore it with a checkpoint."""
        return self._context.rng.get_state()

    @rng_state.setter
    def rng_state(self, state: torch.Tensor) -> None:
        self._context.rng.set_state(state)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model on this rank's rows; scalars come back as means over the global batch."""
        if torch.is_inference_mode_enabled():  # DTensors know no inference mode
            with torch.inference_mode(False), torch.no_grad():
                return self.forward(*args, **kwargs)
        leaves, structure = flatten((args, kwargs))
        check_no_hidden_tensors(leaves)
        if not self._fallback:
            self._context.index_model()
        check = self.before_first_training_call if torch.is_grad_enabled() else None
        if check is not None:
            self.before_first_training_call = None  # copies that planning makes are not to check
        number = self._agree_on_call(leaves, structure)
        if check is not None or not self._settles:
            finish_exchange()
        if self.plan is None and not self._fallback:
            self.plan_for(leaves, structure)
        if check is not None:
            check(self, leaves, structure)
        result = self._run(leaves, structure)
        if self._protocol is not None:
            compared = self._options.batch == "global"
            self._protocol.agree_on_backward(
                result, number, compare=compared, settles=self._settles
            )
            self._protocol.optimizer_steps.restart(self._context.index.parameters.values())
        return result

    @property
    def _settles(self) -> bool:
        """Whether programs settle what ranks agree on, just before they communicate."""
        return isinstance(self._executor, SpmdExecutor) and self._options.backend == "eager"

    def _run(self, leaves: list[Any], structure: Any) -> Any:
        share = self._batch_shard(leaves, structure)
        if self._fallback:
            return self._run_fallback(leaves, share)
        assert self._executor is not None
        try:
            return self._executor.run(leaves, share, self._no_sync)
        except CaptureError as error:
            self._check_runs(leaves, structure, error)
            raise

    def _agree_on_call(self, leaves: list[Any], structure: Any) -> int:
        """Agrees with all ranks on a call, before anything is sent; gives its number."""
        if self._protocol is None:
            return 0
        with self._protocol.reporting_errors():
            state = CallState(
                leaves=leaves,
                structure=structure,
                shard=self._batch_shard(leaves, structure),
                batch=self._options.batch,
                model_parallel_peers=self._options.model_parallel_peers,
                modules=self._context.index.modules,
                parameters=self._context.index.parameters,
                no_sync=self._no_sync,
                unreduced_grads=sorted(self._context.unreduced_grads),
                is_planned=self.plan is not None or bool(self._fallback),
                stage=self._stage,
                dp_rank=self._options.dp_rank(rank()),
                all_tangents=self._context.all_tangents,
                is_captured=not self._fallback,
            )
        return self._protocol.agree_on_call(state, self._replicas)

    @property
    def _stage(self) -> int:
        """This rank's place along the pipeline."""
        return self.plan.mesh_coordinate(rank()).get("pp", 0) if self.plan is not None else 0

    @property
    def _replicas(self) -> Replicas:
        """Parameters and buffers; torch's DDP sends buffers around by itself, at each call."""
        inside = self._context.index
        return Replicas(inside.parameters, {} if self._fallback else inside.buffers())

    def check_replicas(
        self, optimizer: torch.optim.Optimizer | None = None, *, tolerance: float = 0.0
    ) -> None:
        """Checks that all ranks hold equal copies of what they replicate.

        Compares every parameter and buffer, or their shards where several ranks hold the same.
        All ranks call this at once. Each training call compares a few elements by itself.

        Args:
            optimizer: compare its state and hyperparameters, such as learning rates, too.
            tolerance: largest absolute difference that passes; 0 for equal bits.

        Raises:
            DisagreementError: on every rank, with the names and ranks of copies that have parted.
        """
        if self._protocol is not None:
            compare_replicas(self._replicas, optimizer, self._stage, tolerance)

    def train(self, mode: bool = True) -> DistributedModule:
        """Sets training mode, of the model too."""
        super().train(mode)
        self._wrapped[0].training = mode
        return self

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that this rank holds: under a pipeline those of its own stages.

        Where these have none, there are those of the others, without memory: torch's optimizers
        refuse to be made for no parameters, and forget these before their first step.
        """
        found = list(super().named_parameters(prefix, recurse, remove_duplicate))
        yield from [(n, p) for n, p in found if not is_remote(p)] or found

    def requires_grad_(self, requires_grad: bool = True) -> DistributedModule:
        """Freezes the whole model or lets it be trained, on all stages."""
        self._wrapped[0].requires_grad_(requires_grad)
        return self

    def state_dict(  # type: ignore[override]
        self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """The whole model under the plain model's names, on every rank; sharded as on this one.

        Under a pipeline all ranks call this at once: they send each other what they hold.
        """
        if self._protocol is not None and self.plan is not None and self.plan.pp_size > 1:
            self._protocol.agree_on_state_dict()
        found = super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if self.mesh is not None and (
            kept := self._context.compression_state.state_dict(self._own_mesh)
        ):
            found[prefix + STATE_DICT_KEY] = kept
        if self.plan is None or self.plan.pp_size == 1:
            return found
        assert self.mesh is not None
        assert self.plan.pipeline is not None
        model, group = self._wrapped[0], self.mesh.get_group("pp")
        elsewhere = fetch_remote_parameters(model, self.plan.pipeline, group, self._device)
        for name, parameter in model.named_parameters(prefix[:-1], remove_duplicate=False):
            if parameter in elsewhere:
                found[name] = elsewhere[parameter]
        return found

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads whole tensors or DTensors under the plain model's names.

        Of a whole model; a rank takes its own part. Under a pipeline `assign` copies all the same.
        """
        state_dict = dict(state_dict)
        self._take_states(state_dict.pop(STATE_DICT_KEY, None))
        own = dict(self._wrapped[0].named_parameters(remove_duplicate=False))
        values = {name: distribute_like(own.get(name), value) for name, value in state_dict.items()}
        assign = assign and not any(is_remote(parameter) for parameter in own.values())
        return super().load_state_dict(values, strict=strict, assign=assign)

    def _take_states(self, values: Mapping[str, Any] | None) -> None:
        """Loads what compression had kept; keeps it for the plan if there is none yet."""
        if self.plan is None:
            self._pending_compression_state = values
        elif self._context.compression_state.tensors and self.mesh is not None:
            self._context.compression_state.load(values or {}, self._own_mesh)

    @property
    def _own_mesh(self) -> DeviceMesh:
        """The ranks that have this rank's stage."""
        assert self.mesh is not None
        assert self.plan is not None
        return stage_mesh(self.mesh) if self.plan.pp_size > 1 else self.mesh

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """`torch.nn.utils.clip_grad_norm_` over the whole model, whatever of it this rank holds.

        All ranks call this at once.

        Returns:
            The norm before clipping, the same on every rank.

        Raises:
            RuntimeError: on every rank, if the norm is not finite and `error_if_nonfinite`.
        """
        if self._protocol is not None:
            self._protocol.agree_on_clipping(max_norm, norm_type)
        across = self.plan is not None and self.plan.pp_size > 1
        group = self.mesh.get_group("pp") if across and self.mesh is not None else None
        widest = functools.reduce(
            torch.promote_types, (i.dtype for i in self._context.parameters.values())
        )
        like = torch.empty((), dtype=widest, device=self._device)
        own = list(self.parameters())
        return clip_grad_norm(own, max_norm, norm_type, error_if_nonfinite, foreach, like, group)

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedModule:
        """A copy with its own parameters under the same plan, such as an average of weights."""
        made = memo[id(self)] = type(self).__new__(type(self))
        for name, value in self.__dict__.items():
            if name not in ("_context", "_executor", "_protocol"):
                made.__dict__[name] = value if name in SHARED else copy.deepcopy(value, memo)
        model, stream = made._wrapped[0], copy.deepcopy(self._context.rng, memo)
        made._context = replace(
            self._context,
            model=model,
            rng=stream,
            unreduced_grads={},
            compression_state=self._context.compression_state.copy(),
        )
        protocol = self._protocol
        made._protocol = (
            replace(protocol, optimizer_steps=OptimizerSteps()) if protocol is not None else None
        )
        made._context.guards = self._context.guards.copy_for(model)
        made._executor = made._new_runner()
        if isinstance(self._executor, SpmdExecutor) and isinstance(made._executor, SpmdExecutor):
            made._executor.programs = self._executor.programs
        return made

    def copy_with_plan(self, plan: Plan) -> DistributedModule:
        """A copy with its own parameters that follows a plan, while there is none here yet."""
        made = copy.deepcopy(self)
        made._options = made._context.options = replace(made._options, recorder=None, on_trial=True)
        made.apply_plan(plan)
        return made

    # From a call to a program.

    def apply_plan(self, plan: Plan) -> None:
        """Takes a plan: makes the mesh, lays the parameters out and keeps those of own stages."""
        self._divide(plan.model_parallel_size, plan.pp_size)
        self.mesh = mesh = make_mesh(self._device, plan.storage, ("pp", *plan.shard_order))
        run_on_all_ranks(lambda: distribute_plan_parameters(self._wrapped[0], plan, mesh))
        self._context.reindex_model()
        self._context.planning_captures.clear()
        self.plan = plan
        states = CompressionState.of_plan(plan, self._context.parameters, rank(), self._device)
        self._context.compression_state = states
        if self._pending_compression_state is not None:
            self._take_states(self._pending_compression_state)
            self._pending_compression_state = None
        self._context.plan, self._context.mesh = plan, mesh
        self._context.guards.lift(plan.changed)
        self._context.groups = make_groups(self._device, plan.axes, mesh)
        self._executor = self._new_runner()

    def _divide(self, tensor_ranks: int, pipeline_ranks: int) -> None:
        """Learns which ranks have the same rows, where the plan was to decide that."""
        options = replace(self._options, model_parallel_size=tensor_ranks, pp_size=pipeline_ranks)
        if options != self._options:
            self._options = self._context.options = options
            self._context.rng = stream_of(options, self._device)

    def _new_runner(self) -> SpmdExecutor | PipelineExecutor | None:
        if self.plan is None:
            return None
        return (
            SpmdExecutor(self._context)
            if self.plan.pipeline is None
            else PipelineExecutor(self._context)
        )

    def broadcast_parameters(self, *, replicated_dtensors: bool) -> None:
        """Gives all ranks the parameters of rank 0, and DTensors where a plan is yet to come."""
        if self._options.ranks == 1:
            return
        broadcast_from_rank0(self)
        if replicated_dtensors:
            mesh = make_mesh(self._device, ((DATA_AXIS, self._options.ranks),))
            assert mesh is not None
            as_dtensors(self, mesh)
            self._context.reindex_model()

    def plan_for(self, leaves: list[Any], structure: Any) -> None:
        """Plans on the arguments of a call, or falls back."""

        def captured(tensor_ranks: int, pipeline_ranks: int, micro_batches: int) -> Capture:
            options = replace(
                self._options, model_parallel_size=tensor_ranks, pp_size=pipeline_ranks
            )
            share = self._batch_shard(leaves, structure, options).split_micro_batches(
                micro_batches
            )[0]
            return self._context.capture(share, for_planning=True)

        try:
            call = pytree.tree_unflatten(leaves, structure)
            self.apply_plan(self._make_plan(self, captured, call))
        except CaptureError as error:
            self._check_runs(leaves, structure, error)
            # ranks that bring the same rows count alike: means stay what they are
            self._options = replace(self._options, model_parallel_size=1, pp_size=1)
            self._fallback = (self._make_fallback(self._wrapped[0], error),)
            self._context.reindex_model()

    def _check_runs(self, leaves: list[Any], structure: Any, reason: CaptureError) -> None:
        """Raises ModelError, on every rank, if the plain model fails at this call."""
        model, options = self._wrapped[0], self._options
        with_autocast = self._context.autocast()
        run_on_all_ranks(
            lambda: check_runs(model, leaves, structure, options.loss_fn, with_autocast, reason)
        )

    def _batch_shard(
        self, leaves: list[Any], structure: Any, options: Options | None = None
    ) -> BatchShard:
        options = options or self._options
        own, ranks = options.dp_rank(rank()), options.dp_size
        return batch_shard_of(leaves, structure, mode=options.batch, rank=own, ranks=ranks)

    def _run_fallback(self, leaves: list[Any], share: BatchShard) -> Any:
        """Runs torch's own data parallelism on this rank's rows."""
        options, inner, tensors = self._options, self._fallback[0], iter(share.tensors)
        own = [next(tensors) if isinstance(x, TensorSpec) else x for x in share.call.leaves]
        args, kwargs = pytree.tree_unflatten(own, share.call.structure)
        with self._context.autocast(), explaining_row_errors(options.ranks):
            if options.loss_fn is None:
                result = inner(*args, **kwargs)
            else:
                result = options.loss_fn(inner(*args[:-1], **kwargs), args[-1])
        if options.ranks == 1:
            return result
        return average_over_batch(
            result, leaves, share, mode=options.batch, ranks=options.ranks, device=self._device
        )


SHARED = {"plan", "mesh", "_device", "_options", "_make_plan", "_make_fallback"}
