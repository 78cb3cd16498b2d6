"""Capture: one call of a model becomes one joint forward and backward graph with roles.

The model is run once on fake tensors under AOTAutograd, without Dynamo: what torch.export does
by default. Data-dependent Python stops the capture with the user's line in the error. Changes of
Python values by forward become updates, are replayed after every call, or are refused by name.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.fx import traceback as fx_traceback

from autopar import _torch
from autopar._torch import pytree
from autopar.capture.call import Call, TensorSpec
from autopar.capture.expand_blocks import expand
from autopar.capture.joint import Interface, changed_parameters, to_training_graph
from autopar.capture.provenance import Annotate, first_line, user_frame
from autopar.capture.repeated_blocks import RepeatedBlocks
from autopar.capture.state.contents import Snapshot
from autopar.capture.state.effects import Attribute, Effects
from autopar.capture.state.outside import Variable, outside_of
from autopar.capture.state.side_effects import (
    Treatment,
    Write,
    check_changes,
    for_all,
    rebound,
    values_of,
    writes_of,
)
from autopar.capture.traceable import traceable_modules
from autopar.common.containers import flatten, hidden_tensors
from autopar.common.notices import warn_once
from autopar.errors import AutoparError, AutoparWarning, CaptureError, ModelError, StrategyError
from autopar.ir.graph import ParameterInfo, TrainingGraph


@dataclass(frozen=True)
class Capture:
    """A captured call.

    Attributes:
        graph: the joint graph, or the forward alone when nothing is differentiated.
        leaves: flattened outputs; None in the place of tensors, other values as they are.
        tensor_leaves: which outputs are tensors.
        differentiable: which outputs the model itself would let gradients enter by.
        structure: how the outputs unflatten; with `writes`, as a pair of the model's own result and
            the values to write.
        writes: Python values that every call leaves in the model.
        reads: plain attributes that the graph depends on, by module and name.
        classes: attributes of classes that it depends on.
        outside: variables outside of the model that it depends on.
        carried: plain tensors among the attributes, and frozen parameters, that the graph has as
            buffers: a call changes them.
        rebound: buffers that get a new tensor at every call, rather than new values.
        whole: the graph of the whole batch, where `graph` is one slice's; None where it is whole.
    """

    graph: TrainingGraph
    leaves: tuple[Any, ...]
    tensor_leaves: tuple[bool, ...]
    differentiable: tuple[bool, ...]
    structure: Any
    writes: tuple[Write, ...] = ()
    reads: tuple[Attribute, ...] = ()
    classes: tuple[tuple[type, str], ...] = ()
    variables: Mapping[str, Variable] = field(default_factory=dict)
    lifted: tuple[Attribute, ...] = ()
    rebound_buffers: frozenset[str] = frozenset()
    batch_graph: TrainingGraph | None = None

    @property
    def captured_graph(self) -> TrainingGraph:
        """The graph as it was captured."""
        return self.graph if self.batch_graph is None else self.batch_graph


def capture(
    model: nn.Module,
    call: Call,
    parameters: Mapping[str, ParameterInfo],
    *,
    device: torch.device,
    differentiate: bool = True,
    all_tangents: bool = False,
    loss_fn: Callable[..., Any] | None = None,
    lifted: frozenset[Attribute] = frozenset(),
) -> Capture:
    """Captures one call of `model`.

    Args:
        model: the model; its parameters and buffers are replaced by fakes while it is traced.
        call: the arguments of the call, at this rank's rows.
        parameters: every parameter, by name, at its whole shape.
        device: where the parameters live.
        differentiate: whether to capture a backward.
        all_tangents: let gradients enter by every floating-point output. Otherwise, when there
            are scalar outputs (losses), only by these.
        loss_fn: called as `loss_fn(model(*args[:-1]), args[-1])` in place of the model.
        carried: plain tensors among attributes, and frozen parameters, that other calls change.

    Raises:
        CaptureError: the model depends on values in Python, cannot be traced, or changes Python
            values in a way that cannot be replayed.
        StrategyError: `loss_fn` has parameters of its own.
    """
    if isinstance(loss_fn, nn.Module) and any(p.requires_grad for p in loss_fn.parameters()):
        raise StrategyError(
            f"loss_fn={type(loss_fn).__name__}(...) has parameters, which would not be trained: "
            "make it part of the model and let the model return the loss."
        )
    make = functools.partial(
        _Program, model, call, parameters, device, all_tangents, loss_fn, differentiate
    )
    random_state = _random_state()
    with _explained(model), _torch.count_checkpoint_calls() as checkpoints:
        program, module = _treated(make, Treatment(lifted))
    if checkpoints:
        warn_once(
            AutoparWarning,
            f"{type(model).__name__} calls torch.utils.checkpoint, which has no effect in a "
            "captured graph: the plan decides which activations are computed again. Give "
            'autopar.compile memory=, or Strategy(recompute="selective" or "full").',
        )
    if _random_state() != random_state:
        raise CaptureError(
            f"{type(model).__name__} draws numbers from Python's or numpy's `random` while it "
            "runs; a graph would repeat the first draw for ever. Draw with torch instead."
        )
    effects = program.effects
    with contextlib.closing(_later_runs(make, program.treatment)) as following:
        check_changes(effects, following)
    return Capture(
        to_training_graph(module, program.interface(), program.infos, type(model).__name__),
        program.leaves,
        program.tensor_leaves,
        program.differentiable,
        program.structure,
        writes=writes_of(effects.changes, effects.added),
        reads=program.reads(),
        classes=tuple(effects.classes),
        variables=program.outside,
        lifted=tuple(sorted(program.treatment.carried)),
        rebound_buffers=frozenset(program.rebound),
    )


def _treated(
    make: Callable[..., _Program], treatment: Treatment
) -> tuple[_Program, fx.GraphModule]:
    """The traced call, with the treatment that its changes of Python values call for."""
    repeat = True
    while True:
        program = make(treatment)
        if not repeat:
            program.repeats = RepeatedBlocks(program.model[0], ())
        try:
            module = _traced(program)
        except Exception:
            following = treatment.after_error(program.effects)
            if following == treatment:
                raise
        else:
            following = treatment.after(program.effects, changed_parameters(module, program.infos))
            in_block = repeat and bool(program.repeats.kinds and program.effects.changes)
            if following == treatment and not in_block:
                return program, module
            repeat = repeat and not in_block
        treatment = following


def _later_runs(make: Callable[..., _Program], treatment: Treatment) -> Generator[Effects]:
    """The effects of the calls that follow on a first one."""
    made = (make(replace(treatment, counts=frozenset())) for _ in itertools.count())
    program = next(made)
    snapshot = Snapshot(program.model[0])
    try:
        for number in itertools.count():
            program.keep, program.repeats = True, RepeatedBlocks(program.model[0], ())
            with program.fake_mode, torch.no_grad():
                program(*program.inputs)
            if number:
                yield program.effects
            program = next(made)
    finally:
        snapshot.restore()


def _traced(program: _Program) -> fx.GraphModule:
    """The joint graph; repeated blocks are traced once if they turn out to be alike."""

    def attempt() -> fx.GraphModule:
        with contextlib.ExitStack() as stack, fx_traceback.preserve_node_meta():
            stack.enter_context(torch.set_grad_enabled(program.differentiate))
            stack.enter_context(_without_autocast_cache())
            stack.enter_context(_torch.without_effect_tokens())
            inputs = tuple(program.inputs)
            return _torch.aot_export_joint_with_descriptors(stack, program, inputs).graph_module

    if program.repeats.kinds:
        try:
            module = attempt()
            expand(module.graph)
            return module
        except Exception:  # whatever it is, it counts if it happens without this too
            program.repeats = RepeatedBlocks(program.model[0], ())
    return attempt()


class _Program(nn.Module):
    """The call as a function of tensors: parameters, buffers and tensor arguments."""

    def __init__(
        self,
        model: nn.Module,
        call: Call,
        parameters: Mapping[str, ParameterInfo],
        device: torch.device,
        all_tangents: bool,
        loss_fn: Callable[..., Any] | None,
        differentiate: bool,
        treatment: Treatment,
    ) -> None:
        super().__init__()
        self.model = (model,)  # in a tuple, so that its own parameters are not this module's
        self.loss_fn = (loss_fn,)
        blocks = dict.fromkeys(info.block for info in parameters.values() if info.block)
        self.repeats = RepeatedBlocks(model, tuple(blocks))
        self.call, self.all_tangents = call, all_tangents
        carried = {place: ".".join(filter(None, place)) for place in sorted(treatment.carried)}
        self.carried = tuple(carried.values())
        parameters = {n: info for n, info in parameters.items() if n not in self.carried}
        self.infos, self.names = parameters, tuple(parameters)
        self.differentiate, self.treatment, self.keep = differentiate, treatment, False
        self.fake_mode = _torch.FakeTensorMode(allow_non_fake_inputs=True)
        state = dict(model.named_buffers())
        state |= {name: getattr(model.get_submodule(m), k) for (m, k), name in carried.items()}
        self.buffer_names = tuple(state)
        self.positions = [i for i, x in enumerate(call.leaves) if isinstance(x, TensorSpec)]
        with self.fake_mode:
            self.values = nn.ParameterList(
                nn.Parameter(
                    TensorSpec(p.shape, p.dtype, device).fake(),
                    requires_grad=p.requires_grad and differentiate,
                )
                for p in parameters.values()
            )
            for index, buffer in enumerate(state.values()):
                spec = TensorSpec(tuple(buffer.shape), buffer.dtype, device)
                self.register_buffer(f"b{index}", spec.fake())
            self.inputs = [self._input(call.leaves[i], device) for i in self.positions]
        self.outside = outside_of(model, loss_fn)
        self.effects = Effects(model)
        self.rebound: tuple[str, ...] = ()
        self.leaves: tuple[Any, ...] = ()
        self.tensor_leaves: tuple[bool, ...] = ()
        self.differentiable: tuple[bool, ...] = ()
        self.structure: Any = None

    def _input(self, spec: TensorSpec, device: torch.device) -> torch.Tensor:
        fake = (replace(spec, device=device) if spec.device.type == "meta" else spec).fake()
        return fake if self.differentiate else fake.detach()

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = list(self.call.leaves)
        for position, tensor in zip(self.positions, tensors, strict=True):
            leaves[position] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.call.structure)
        (model,), (loss_fn,) = self.model, self.loss_fn
        known = dict(zip(self.names, self.values, strict=True))
        known |= {name: getattr(self, f"b{i}") for i, name in enumerate(self.buffer_names)}
        first = _places(model) | {name: name for name in self.carried}
        state = {name: known[other] for name, other in first.items()}
        self.effects = effects = Effects(
            model, self.outside, self.treatment.counts, self.keep, tuple(known.values())
        )
        with contextlib.ExitStack() as stack:
            annotate = stack.enter_context(Annotate(model))
            stack.enter_context(_torch.pretend_compiling())
            stack.enter_context(_torch.skip_causal_mask_detection())
            stack.enter_context(traceable_modules())
            stack.enter_context(self.repeats.marking())
            stack.enter_context(effects.watching())
            target = None
            if loss_fn is not None:
                *args, target = args
            result = torch.func.functional_call(
                model, state, tuple(args), kwargs, tie_weights=False
            )
            if loss_fn is not None:
                annotate.module = ""
                result = loss_fn(result, target)
        before = {name: known[other] for name, other in first.items()}
        self.rebound = rebound(type(model).__name__, before, state, self.names)
        return (*self._tensors_of(result), *(state[name].detach() for name in self.rebound))

    def interface(self) -> Interface:
        """The inputs and outputs of the last run."""
        return Interface(
            self.names, self.buffer_names, self.positions, self.tensor_leaves, self.rebound
        )

    def reads(self) -> tuple[Attribute, ...]:
        """Attributes that the graph depends on; those of a repeated block count for all of them."""
        names = {module: name for name, module in self.model[0].named_modules()}
        columns = [[names[m] for m in column] for column in self.repeats.columns()]
        found = [*self.effects.reads, *self.treatment.carried]
        return tuple(a for a in for_all(found, columns) if a not in self.treatment.counts)

    def _tensors_of(self, result: Any) -> tuple[torch.Tensor, ...]:
        own, _ = flatten(result)
        if written := values_of(self.effects.changes, self.effects.added):
            result = (result, written)
        leaves, self.structure = flatten(result)
        for leaf in leaves:
            if hidden_tensors(leaf):
                raise ModelError(
                    f"{type(self.model[0]).__name__} returns a {type(leaf).__qualname__}, whose "
                    "tensors autopar cannot see: return tensors, or a tuple, list, dict, "
                    "dataclass or SimpleNamespace of them."
                )
        self.tensor_leaves = tuple(isinstance(x, torch.Tensor) for x in leaves)
        self.leaves = tuple(None if isinstance(x, torch.Tensor) else x for x in leaves)
        self.differentiable = tuple(isinstance(x, torch.Tensor) and x.requires_grad for x in leaves)
        outputs = [x for x in leaves if isinstance(x, torch.Tensor)]
        losses = [x for x in own if isinstance(x, torch.Tensor) and x.requires_grad and not x.dim()]
        if losses and not self.all_tangents:
            outputs = [x if x.dim() == 0 else x.detach() for x in outputs]
        return tuple(outputs)


def _places(model: nn.Module) -> dict[str, str]:
    """Each place that holds a parameter or buffer, once, and the first name of what it holds."""
    places: dict[tuple[int, str], tuple[str, torch.Tensor]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                place = (id(module), key)
                places.setdefault(place, (f"{prefix}.{key}" if prefix else key, tensor))
    first: dict[int, str] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        first.setdefault(id(tensor), name)
    return {name: first[id(tensor)] for name, tensor in places.values()}


def _random_state() -> tuple[object, ...]:
    """Where Python's and numpy's global generators stand."""
    numbers: Any = np.random.get_state()
    return random.getstate(), bytes(numbers[1]), numbers[2]


@contextlib.contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Casts of weights made while tracing must not outlive the trace."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


@contextlib.contextmanager
def _explained(model: nn.Module) -> Iterator[None]:
    """Turns whatever tracing raises into a CaptureError that names the user's line."""
    try:
        with _torch.mute_fake_tensor_log():
            yield
    except AutoparError:
        raise
    except Exception as error:
        where, reason = user_frame(error), first_line(error)
        if isinstance(error, _torch.DataDependentOutputException):
            reason = f"Python needs the value of a tensor ({reason})"
        elif isinstance(error, _torch.DynamicOutputShapeException):
            reason = f"the shape of a result depends on values ({reason})"
        raise CaptureError(
            f"cannot capture {type(model).__name__}{where}: {reason}. Express it with tensor "
            "operations (torch.where, masks)."
        ) from error
