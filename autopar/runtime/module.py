"""`DistributedModule`: the model as the user trains it."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar._torch import laid_as, pytree
from autopar.capture import Call, Capture, TensorSpec, capture
from autopar.errors import CaptureError
from autopar.graph import (
    Buffer,
    Evidence,
    Input,
    Parameter,
    ParameterInfo,
    RowWeight,
)
from autopar.plan import Plan
from autopar.rows import mark_rows
from autopar.runtime.batch import Share, check_twins, check_verdict, evidence, share_of
from autopar.runtime.calls import MakeWays, ways_of_call
from autopar.runtime.clipping import clip_grad_norm
from autopar.runtime.fallback import as_global
from autopar.runtime.groups import backend_of, group_names, make_mesh, rank
from autopar.runtime.holding import agree_on_frozen, fetched, hold, stage_mesh
from autopar.runtime.inside import Inside
from autopar.runtime.interleaved import support_interleaved
from autopar.runtime.options import Options
from autopar.runtime.parameters import (
    as_dtensors,
    broadcast_state,
    is_elsewhere,
    laid_out_as,
    lay_out,
    local,
)
from autopar.runtime.pipes import Pipes
from autopar.runtime.program import Half, Program, build, with_axes
from autopar.runtime.random import RandomStream
from autopar.runtime.step import Differentiable, Running, Step, run_forward

MakePlan = Callable[[Callable[[int], Capture]], Plan]
MakeFallback = Callable[[nn.Module, CaptureError], nn.Module]


class DistributedModule(nn.Module):
    """A model that runs its share of every call under a plan.

    It has the parameters, buffers, submodules, names and attributes of the model it was made
    from, and is used as that would be. Parameters that the plan shards are DTensors.

    Attributes:
        plan: the plan; None until the first call if there were no example inputs.
        mesh: the DeviceMesh of the plan; None for one rank.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, ParameterInfo],
        device: torch.device,
        options: Options,
        make_plan: MakePlan,
        make_fallback: MakeFallback,
        make_ways: MakeWays,
    ) -> None:
        super().__init__()
        self._wrapped = (model,)
        for table in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[table] = getattr(model, table)
        self.training = model.training
        self._infos = dict(parameters)
        self._device, self._options, self._make_plan = device, options, make_plan
        self._make_fallback, self._make_ways = make_fallback, make_ways
        self._fallback: tuple[nn.Module, ...] = ()
        self.plan: Plan | None = None
        self.mesh: DeviceMesh | None = None
        self._programs: dict[Any, Program] = {}
        self._pipes: Pipes | None = None
        self._captures: dict[Any, Capture] = {}
        self._held: dict[str, torch.Tensor] = {}
        self._hold = False
        self._all_tangents = False
        self._settled = True
        models = options.ranks // options.tensor_ranks
        own = rank() // options.tensor_ranks if options.ranks > 1 else 0
        self._random = RandomStream(own, models, device, shared=options.tensor_ranks > 1)

    # What a training script asks of it.

    @property
    def data_parallel_size(self) -> int:
        """Among how many ranks the rows of a batch are divided."""
        return self._options.data_ranks

    @property
    def data_parallel_rank(self) -> int:
        """Which of these ranks this one is; ranks that share a model are the same one."""
        options = self._options
        return rank() // options.tensor_ranks % options.data_ranks if options.ranks > 1 else 0

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Calls inside keep their gradients on this rank; the next call outside adds and reduces.

        While gradients are held back, `.grad` is not changed.
        """
        if self._fallback:
            with getattr(self._fallback[0], "no_sync", contextlib.nullcontext)():
                yield
            return
        before, self._hold = self._hold, self._options.data_ranks > 1
        try:
            yield
        finally:
            self._hold = before

    @property
    def rng_state(self) -> torch.Tensor:
        """State of this rank's random stream (dropout); save and restore it with a checkpoint."""
        return self._random.get()

    @rng_state.setter
    def rng_state(self, state: torch.Tensor) -> None:
        self._random.set(state)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model on this rank's rows; scalars come back as means over the global batch."""
        if torch.is_inference_mode_enabled():  # DTensors know no inference mode
            with torch.inference_mode(False), torch.no_grad():
                return self.forward(*args, **kwargs)
        leaves, structure = pytree.tree_flatten((args, kwargs))
        if self.plan is None and not self._fallback:
            self._plan_on(self._share(leaves, structure))
        share = self._share(leaves, structure)
        if self._fallback:
            return self._run_fallback(leaves, share)
        if not self._settled:
            agree_on_frozen(self._wrapped[0])
            self._settled = True
        if self._pipes is not None:
            return self._pipes.run(leaves, share, self._hold)
        return self._run(leaves, share)

    def train(self, mode: bool = True) -> DistributedModule:
        """Sets training mode, of the model too."""
        super().train(mode)
        self._wrapped[0].training = mode
        return self

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that this rank holds: under a pipeline those of its own stages."""
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            if not is_elsewhere(parameter):
                yield name, parameter

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
        found = super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if self.plan is None or self.plan.pipeline_ranks == 1:
            return found
        assert self.mesh is not None
        assert self.plan.pipeline is not None
        model, group = self._wrapped[0], self.mesh.get_group("pp")
        elsewhere = fetched(model, self.plan.pipeline, group, self._device)
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
        own = dict(self._wrapped[0].named_parameters(remove_duplicate=False))
        values = {name: laid_out_as(own.get(name), value) for name, value in state_dict.items()}
        assign = assign and not any(is_elsewhere(parameter) for parameter in own.values())
        return super().load_state_dict(values, strict=strict, assign=assign)

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
        across = self.plan is not None and self.plan.pipeline_ranks > 1
        group = self.mesh.get_group("pp") if across and self.mesh is not None else None
        widest = functools.reduce(torch.promote_types, (i.dtype for i in self._infos.values()))
        like = torch.empty((), dtype=widest, device=self._device)
        own = list(self.parameters())
        return clip_grad_norm(own, max_norm, norm_type, error_if_nonfinite, foreach, like, group)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_wrapped":
                raise
            value = getattr(self._wrapped[0], name)
            # models of transformers answer with the device of their first parameter
            is_meta = isinstance(value, torch.device) and value.type == "meta"
            return self._device if is_meta else value

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedModule:
        """A copy with its own parameters under the same plan, such as an average of weights."""
        made = memo[id(self)] = type(self).__new__(type(self))
        for name, value in self.__dict__.items():
            if name not in ("_inside", "_held", "_pipes"):
                made.__dict__[name] = value if name in SHARED else copy.deepcopy(value, memo)
        made._held = {}
        made._pipes = made._new_pipes()
        return made

    # From a call to a program.

    def adopt(self, plan: Plan) -> None:
        """Takes a plan: makes the mesh, lays the parameters out and keeps those of own stages."""
        self.mesh = mesh = make_mesh(self._device, plan.mesh, ("pp", *plan.cuts))
        model, across = self._wrapped[0], plan.pipeline_ranks > 1
        lazy = across and any(isinstance(p, DTensor) for p in model.parameters())
        if mesh is not None and (plan.shards_parameters or lazy):
            layouts = {name: plan.layout(name) for name in self._infos}
            if plan.interleaves:
                support_interleaved()
            lay_out(model, stage_mesh(mesh, plan.axis) if across else mesh, layouts)
        if across and plan.pipeline is not None:
            hold(model, plan.pipeline.held(plan.place(rank())["pp"]))
        self.__dict__.pop("_inside", None)
        self.plan, self._settled = plan, not across
        self._pipes = self._new_pipes()

    def _new_pipes(self) -> Pipes | None:
        if self.plan is None or self.plan.pipeline is None:
            return None
        return Pipes(
            self.plan,
            self.mesh,
            self._device,
            self._options.backend,
            self._capture,
            self._key,
            lambda: self._inside,
            self._random,
            self._held,
            self._wrap,
            self._enter_by_all,
            self._make_ways,
        )

    def prepare(self, *, replicated_dtensors: bool) -> None:
        """Gives all ranks the parameters of rank 0, and DTensors where a plan is yet to come."""
        if self._options.ranks == 1:
            return
        broadcast_state(self)
        if replicated_dtensors:
            mesh = make_mesh(self._device, (("dp_shard", self._options.ranks),))
            assert mesh is not None
            as_dtensors(self, mesh)
            self.__dict__.pop("_inside", None)

    def plan_for(self, leaves: list[Any], structure: Any) -> None:
        """Plans on example arguments."""
        self._plan_on(self._share(leaves, structure))

    def _share(self, leaves: list[Any], structure: Any) -> Share:
        mode, ranks = self._options.batch, self._options.data_ranks
        return share_of(leaves, structure, mode=mode, rank=self.data_parallel_rank, ranks=ranks)

    def _plan_on(self, share: Share) -> None:
        """Plans on the arguments of a call, or falls back."""
        try:
            self.adopt(self._make_plan(lambda micro: self._capture_for_planning(share, micro)))
        except CaptureError as error:
            # ranks that bring the same rows count alike: means stay what they are
            self._options = replace(self._options, tensor_ranks=1, pipeline_ranks=1)
            self._fallback = (self._make_fallback(self._wrapped[0], error),)

    def _run_fallback(self, leaves: list[Any], share: Share) -> Any:
        """Runs torch's own data parallelism on this rank's rows."""
        options, inner, tensors = self._options, self._fallback[0], iter(share.tensors)
        own = [next(tensors) if isinstance(x, TensorSpec) else x for x in share.call.leaves]
        args, kwargs = pytree.tree_unflatten(own, share.call.structure)
        with self._autocast():
            if options.loss_fn is None:
                result = inner(*args, **kwargs)
            else:
                result = options.loss_fn(inner(*args[:-1], **kwargs), args[-1])
        if options.ranks == 1:
            return result
        return as_global(
            result, leaves, share, mode=options.batch, ranks=options.ranks, device=self._device
        )

    @cached_property
    def _inside(self) -> Inside:
        """What the model holds, looked up once: calls are many, and modules do not change."""
        return Inside.of(self._wrapped[0])

    def _capture_for_planning(self, share: Share, micro_batches: int) -> Capture:
        return self._capture(share.micro_batches(micro_batches)[0], for_planning=True)

    def _capture(self, share: Share, for_planning: bool = False) -> Capture:
        """Captures a call; the backward too, if it may be wanted."""
        differentiate = for_planning or torch.is_grad_enabled()
        key = (*self._key(share), differentiate)
        if key not in self._captures:
            self._captures[key] = self._new_capture(share, differentiate)
        return self._captures[key]

    def _new_capture(self, share: Share, differentiate: bool) -> Capture:
        model, options = self._wrapped[0], self._options
        now = {
            name: replace(info, requires_grad=self._inside.parameters[name].requires_grad)
            for name, info in self._infos.items()
        }

        def attempt(call: Call) -> Capture:
            with self._autocast():
                made = capture(
                    model,
                    call,
                    now,  # parameters may have been frozen since; their layouts stay the plan's
                    device=self._device,
                    differentiate=differentiate,
                    all_tangents=self._all_tangents,
                    loss_fn=options.loss_fn,
                )
            return replace(made, graph=replace(made.graph, parameters=self._infos))

        if share.slices == 1:
            return attempt(share.call)
        return mark_rows(attempt, share.call, share.rows, share.total, share.slices)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self._options.precision is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=self._options.precision)

    def _key(self, share: Share) -> tuple[Any, ...]:
        kind = self._device.type
        autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        call = share.call
        leaves = tuple(x if _hashable(x) else repr(x) for x in call.leaves)
        modes = tuple(m.training for m in self._inside.modules)
        called = (leaves, call.structure, call.has_rows, share.total, share.slices)
        trained = tuple(p.requires_grad for p in self._inside.parameters.values())
        return (*called, autocast, modes, trained, self._all_tangents)

    def _program(self, share: Share, hold: bool = False, held: tuple[str, ...] = ()) -> Program:
        assert self.plan is not None
        key = (*self._key(share), torch.is_grad_enabled(), hold, held)
        if key not in self._programs:
            captured = self._capture(share)
            graph = with_axes(captured.graph, self.plan)
            self._programs[key] = build(
                captured,
                self.plan,
                rank=rank(),
                ways=ways_of_call(
                    graph, self.plan, rank(), share.total, share.slices, self._make_ways
                ),
                comm_backend=backend_of(self._device),
                groups=group_names(self.mesh),
                compile_backend=self._options.backend,
                hold=hold,
                held=held,
                recorder=self._options.recorder,
            )
        return self._programs[key]

    def _run(self, leaves: list[Any], share: Share) -> Any:
        hold = self._hold
        program = self._program(share, hold)
        running = Running(
            program,
            self._arguments(program, leaves, share),
            differentiable=(),
            backward_half=lambda p: self._backward(p, share, hold),
            general=lambda: self._general(share, hold),
            held=self._held,
            wrap=self._wrap,
            updates={},
        )
        with self._random.during(program.is_random), _no_autocast(self._device):
            if program.backward is None:
                with torch.no_grad():
                    outputs = run_forward(running, program)[0]
            else:
                running.differentiable, tensors = self._differentiable(program, share)
                outputs = Step.apply(running, *tensors)
        self._finish(running, share)
        result = list(program.capture.leaves)
        for index, value in zip(program.returned, outputs, strict=True):
            result[index] = value
        return pytree.tree_unflatten(result, program.capture.structure)

    def _arguments(self, program: Program, leaves: list[Any], share: Share) -> list[Any]:
        named, buffers = self._inside.parameters, self._inside.buffers()
        indices = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
        inputs = dict(zip(indices, share.tensors, strict=True))
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
                    values.append(torch.tensor(weight, dtype=torch.float64, device=self._device))
                case Evidence(axis):
                    mode = "global" if axis else self._options.batch
                    values.append(evidence(leaves, share.rows, mode, self._device))
        return values

    def _differentiable(
        self, program: Program, share: Share
    ) -> tuple[tuple[Differentiable, ...], list[torch.Tensor]]:
        roles: list[Differentiable] = []
        tensors: list[torch.Tensor] = []
        for name, parameter in self._inside.parameters.items():
            if parameter.requires_grad and not is_elsewhere(parameter):
                roles.append(Parameter(name))
                tensors.append(parameter)
        positions = [i for i, x in enumerate(share.call.leaves) if isinstance(x, TensorSpec)]
        for index, tensor in zip(positions, share.tensors, strict=True):
            if tensor.requires_grad:
                roles.append(Input(index))
                tensors.append(tensor)
        return tuple(roles), tensors

    def _backward(self, program: Program, share: Share, hold: bool) -> Half:
        """The backward that adds what is held at the time that it runs."""
        if hold or not self._held:
            half = program.backward
        else:
            with torch.enable_grad():
                half = self._program(share, False, tuple(sorted(self._held))).backward
        assert half is not None
        return half

    def _general(self, share: Share, hold: bool) -> Program:
        """The call with gradients entering by every output, from now on."""
        self._enter_by_all()
        with torch.enable_grad():
            return self._program(share, hold)

    def _enter_by_all(self) -> None:
        self._all_tangents = True

    def _finish(self, running: Running, share: Share) -> None:
        for axis, verdict in running.verdicts.items():
            if axis:
                check_twins(verdict, self._options.tensor_ranks)
            else:
                check_verdict(verdict, self._options.data_ranks, self._options.batch)
        buffers = self._inside.buffers()
        inputs = iter(share.tensors)
        positions = {
            i: next(inputs) for i, x in enumerate(share.call.leaves) if isinstance(x, TensorSpec)
        }
        with torch.no_grad():
            for of, value in running.updates.items():
                target = buffers[of.name] if isinstance(of, Buffer) else positions[of.index]
                target.copy_(value)
        running.updates.clear()  # the caller may hold the loss, and by it all this, for a step more

    def _wrap(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        parameter = self._inside.parameters[name]
        if not isinstance(parameter, DTensor):
            return gradient
        return laid_as(gradient, parameter)


SHARED = {"plan", "mesh", "_infos", "_device", "_options", "_programs", "_captures"} | {
    "_make_plan",
    "_make_fallback",
    "_make_ways",
}


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _no_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    if not torch.is_autocast_enabled(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)
