"""`capture`: one call of a model as one joint forward and backward graph with roles.

The model runs once on fake tensors under AOTAutograd, without Dynamo, as in non-strict
torch.export. Data-dependent Python raises an error with the user's line. Python values that
forward changes become buffers, are replayed after every call, or are refused by name.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import random
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.fx import traceback as fx_traceback

from autopar import _torch
from autopar.capture.call import Call
from autopar.capture.expand_blocks import expand
from autopar.capture.joint import changed_parameters, to_training_graph
from autopar.capture.provenance import user_frame
from autopar.capture.sorted_rows import undo_sorts
from autopar.capture.state.contents import Attribute, Snapshot
from autopar.capture.state.effects import Effects
from autopar.capture.state.iterators import iterators_in
from autopar.capture.state.python_backward import BackwardReads
from autopar.capture.state.side_effects import StatePolicy, Write, check_changes, writes_of
from autopar.capture.state.variables import Variable
from autopar.capture.symbolic_sizes import SymbolicSizes, inline_sizes
from autopar.capture.traced_call import TracedCall
from autopar.capture.values.argument_reads import Readings
from autopar.capture.values.checkpoint_calls import (
    CheckpointCalls,
    without_reentrant_checkpoints,
)
from autopar.capture.values.compiler_branches import CompilerBranches, Site
from autopar.capture.values.decompositions import DECOMPOSITIONS
from autopar.capture.values.replay import NO_STEPS, Replay
from autopar.core.common.notices import warn_once
from autopar.core.ir.graph import ParameterInfo, TrainingGraph
from autopar.core.ir.placement import Shard
from autopar.core.ir.roles import Output
from autopar.errors import (
    AutoparError,
    AutoparWarning,
    CaptureError,
    NumericsWarning,
    StrategyError,
)
from autopar.formatting import first_line


@dataclass(frozen=True)
class Capture:
    """A captured call.

    Attributes:
        captured_graph: graph of the whole batch, of which `graph` may be one slice's.
        leaves: flattened outputs, None for tensors.
        tensor_leaves: which outputs are tensors.
        differentiable: which outputs of the plain model require gradients.
        linked: which outputs others were computed from, on a way that has gradients.
        structure: tree structure of the outputs; with `writes`, of the pair (result, values).
        writes: Python values that every call writes to the model.
        reads: plain attributes that the graph depends on.
        classes, variables: class attributes and variables that it depends on.
        backward: state that the Python code of its backward reads.
        lifted: plain tensor attributes and frozen parameters that are buffers of the graph.
        rebound_buffers: buffers that every call rebinds to a new tensor.
        compiled: sites where the model was told of a compiler.
        constants: values of constants that Python read.
        traced: the graph in this rank's own order of operators, None while it is made.
        call: the call that was captured, of the whole batch.
        capture_s: duration of the capture in seconds.
        is_derived: whether the graph is that of another shape with other sizes.
    """

    graph: TrainingGraph
    captured_graph: TrainingGraph
    leaves: tuple[Any, ...]
    tensor_leaves: tuple[bool, ...]
    differentiable: tuple[bool, ...]
    structure: Any
    linked: tuple[bool, ...] = ()
    writes: tuple[Write, ...] = ()
    reads: tuple[Attribute, ...] = ()
    classes: tuple[tuple[type, str], ...] = ()
    variables: Mapping[str, Variable] = field(default_factory=dict)
    backward: BackwardReads = field(default_factory=BackwardReads)
    lifted: tuple[Attribute, ...] = ()
    rebound_buffers: frozenset[str] = frozenset()
    compiled: frozenset[Site] = frozenset()
    constants: Replay = NO_STEPS
    traced: TrainingGraph | None = None
    call: Call | None = None
    capture_s: float = 0.0
    is_derived: bool = False

    @property
    def assigned_outputs(self) -> frozenset[int]:
        """Indices of the outputs that every call writes to attributes of the model."""
        if not self.writes:
            return frozenset()
        tree = _torch.pytree.tree_unflatten(list(range(len(self.leaves))), self.structure)
        return frozenset(_torch.pytree.tree_leaves(tree[1]))

    @functools.cached_property
    def rows_of_outputs(self) -> tuple[Shard | None, ...]:
        """The shard of each output that is a slice of the whole batch's, else None."""
        found: list[Shard | None] = [None] * len(self.leaves)
        for role, node in zip(self.graph.outputs, self.graph.results, strict=True):
            if not isinstance(role, Output) or node is None or not self.tensor_leaves[role.index]:
                continue
            if dims := (node.meta.get("batch_dims") or ((),))[0]:
                found[role.index] = Shard(dims[0], node.meta.get("batch_interleave", 1))
        return tuple(found)


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
    """Captures one call of `model`; fakes replace its parameters and buffers during the trace.

    A given loss function is called as `loss_fn(model(*args[:-1]), args[-1])`. Only scalar outputs
    receive gradients, unless there are none or `all_tangents`. `lifted` are plain tensor
    attributes, and frozen parameters, that other calls change.

    Raises:
        CaptureError: the model depends on tensor values in Python, cannot be traced, or changes
            Python values in a way that cannot be replayed.
        StrategyError: `loss_fn` has parameters.
    """
    if isinstance(loss_fn, nn.Module) and any(p.requires_grad for p in loss_fn.parameters()):
        raise StrategyError(
            f"loss_fn={type(loss_fn).__name__}(...) has parameters, which would not be trained: "
            "make it part of the model and let the model return the loss."
        )
    _load_tracer()
    arguments = model, call, parameters, device, all_tangents, loss_fn, differentiate
    random_state = _random_state()
    checkpoints = CheckpointCalls(model)
    with checkpoints.recording():
        make, traced, module = _trace_plain_branches(arguments, StatePolicy(lifted))
    if checkpoints.count:
        _tell_of_checkpoints(model, sorted(checkpoints.changed_buffers) if differentiate else [])
    if _random_state() != random_state:
        raise CaptureError(
            f"{type(model).__name__} draws numbers from Python's or numpy's `random` while it "
            "runs; a graph would repeat the first draw for ever. Draw with torch instead."
        )
    effects = traced.effects
    _check_no_iterators(traced)
    # Closing the generator restores the model: check_changes may stop after any of the runs.
    with contextlib.closing(_following_effects(make, traced.policy)) as following:
        check_changes(effects, following)
    return _capture_of(traced, module)


def _tell_of_checkpoints(model: nn.Module, changed_buffers: Sequence[str]) -> None:
    warn_once(
        AutoparWarning,
        f"{type(model).__name__} calls torch.utils.checkpoint, which has no effect in a "
        "captured graph: the plan decides which activations are computed again. Give "
        'autopar.compile memory=, or Strategy(recompute="selective" or "full").',
    )
    if changed_buffers:
        others = len(changed_buffers) - 1
        more = f" (and {others} more)" if others else ""
        warn_once(
            NumericsWarning,
            f"{changed_buffers[0]}{more} changes inside torch.utils.checkpoint. One device changes "
            "it twice a step, in forward and where backward computes forward again; autopar "
            "changes it once. Outputs in evaluation mode differ from one device. They agree "
            "without checkpoint: autopar's plan decides what is computed again.",
        )


def capture_symbolically(
    model: nn.Module,
    call: Call,
    parameters: Mapping[str, ParameterInfo],
    sizes: SymbolicSizes,
    *,
    device: torch.device,
    differentiate: bool = True,
    all_tangents: bool = False,
    loss_fn: Callable[..., Any] | None = None,
    lifted: frozenset[Attribute] = frozenset(),
    compiled: frozenset[Site] = frozenset(),
) -> Capture:
    """`capture` of a call that was captured before, with symbols for some sizes.

    `compiled` are the sites of the first capture.

    Raises:
        CaptureError: the model changes Python values, or cannot be traced.
    """
    _load_tracer()
    policy = StatePolicy(lifted)
    arguments = model, call, parameters, device, all_tangents, loss_fn, differentiate, policy, sizes
    traced = TracedCall(*arguments, branches=CompilerBranches(compiled))
    with _explained(model):
        module = _trace_joint(traced)
    if policy.after_run(traced.effects, changed_parameters(module, traced.infos)) != policy:
        raise CaptureError(f"{type(model).__name__} changes Python values")
    _check_no_iterators(traced)
    return _capture_of(traced, module)


def read_arguments(
    model: nn.Module,
    call: Call,
    values: Sequence[Tensor],
    parameters: Mapping[str, ParameterInfo],
    *,
    device: torch.device,
    differentiate: bool = True,
    all_tangents: bool = False,
    loss_fn: Callable[..., Any] | None = None,
    lifted: frozenset[Attribute] = frozenset(),
) -> Readings:
    """Values that forward reads in Python from the tensor arguments of a call, which are `values`.

    Forward runs on fake tensors, and computes beside them what follows from arguments alone.

    Raises:
        CaptureError: forward reads other values too, or cannot be traced.
    """
    _load_tracer()
    policy = StatePolicy(lifted)
    arguments = model, call, parameters, device, all_tangents, loss_fn, differentiate, policy
    traced = TracedCall(*arguments, branches=CompilerBranches())
    traced.trace_all_blocks()
    # forward may write them in place, here as well as when it is called
    traced.values_of_arguments = [value.detach().clone() for value in values]
    with _explained(model), traced.fake_mode, torch.set_grad_enabled(differentiate):
        traced(*traced.inputs)
    assert traced.reads_of_arguments is not None
    return traced.reads_of_arguments.readings()


def _load_tracer() -> None:
    """Loads Dynamo's modules outside of any mode, and of any record of what a model changes."""
    importlib.import_module("autopar._torch_dynamo")


def _check_no_iterators(traced: TracedCall) -> None:
    """Checks that no state was read which cannot be compared.

    Raises:
        StrategyError: the model reads an iterator.
    """
    modules = dict(traced.model[0].named_modules())
    read = {f"self.{key}": vars(modules[name]).get(key) for name, key in traced.reads()}
    read |= {name: variable.value for name, variable in traced.search.read().items()}
    for name, value in read.items():
        for iterator in iterators_in(value):
            raise StrategyError(
                f"{type(traced.model[0]).__name__} reads {name}, "
                f"{'' if iterator is value else 'with '}a {type(iterator).__name__}: a graph "
                "would repeat its first values for ever. Take values from it in the loop and give "
                "them as arguments, or keep a list and count calls in an attribute."
            )


def _capture_of(traced: TracedCall, module: fx.GraphModule) -> Capture:
    graph, effects = to_training_graph(module, traced), traced.effects
    undo_sorts(graph)
    return Capture(
        graph,
        graph,
        traced.leaves,
        traced.tensor_leaves,
        traced.differentiable,
        traced.structure,
        linked=traced.linked,
        writes=() if traced.call.derivatives else tuple(writes_of(effects)),
        reads=traced.reads(),
        classes=tuple(effects.classes),
        variables=traced.search.read(),
        backward=traced.reads_of_backward(),
        lifted=tuple(sorted(traced.policy.lifted)),
        rebound_buffers=frozenset(traced.rebound),
        compiled=traced.branches.compiled,
        constants=Replay.of(traced.steps),
    )


def _trace_plain_branches(
    arguments: tuple[Any, ...], policy: StatePolicy
) -> tuple[Callable[[StatePolicy], TracedCall], TracedCall, fx.GraphModule]:
    """Traces the plain model, with a compiler's branches only where the plain ones fail."""
    branches: CompilerBranches | None = CompilerBranches()
    errors: list[CaptureError] = []
    while branches is not None:
        make = functools.partial(TracedCall, *arguments, branches=branches)
        try:
            with _explained(arguments[0]):
                return make, *_trace_until_stable(make, policy)
        except CaptureError as error:
            errors.append(error)
            branches = branches.following()
    raise errors[0]


def _trace_until_stable(
    make: Callable[[StatePolicy], TracedCall], policy: StatePolicy
) -> tuple[TracedCall, fx.GraphModule]:
    """Traces the call again until the policy fits its changes of Python values."""
    share_blocks = True
    while True:
        traced = make(policy)
        if not share_blocks:
            traced.trace_all_blocks()
        try:
            module = _trace_joint(traced)
        except Exception:
            if traced.effects.set_up:  # the next run finds the hooks that this one added
                continue
            following = policy.after_error(traced.effects)
            if following == policy:
                raise
        else:
            if traced.effects.set_up:
                continue
            changed = changed_parameters(module, traced.infos)
            following = policy.after_run(traced.effects, changed)
            # Of equal blocks only the first ran. Changes that the others make outside of
            # themselves, such as to a counter that they share, are missing here.
            if not (share_blocks and traced.repeats.kinds and traced.effects.changes):
                if following == policy:
                    return traced, module
            else:
                share_blocks = False
        policy = following


def _following_effects(
    make: Callable[[StatePolicy], TracedCall], policy: StatePolicy
) -> Generator[Effects]:
    """Effects of the calls after the first; each call starts with the changes of earlier ones."""
    calls = (make(replace(policy, counters=frozenset())) for _ in itertools.count())
    traced = next(calls)
    snapshot = Snapshot(traced.model[0])
    try:
        for number in itertools.count():
            traced.keep = True
            traced.trace_all_blocks()
            with traced.fake_mode, torch.no_grad():
                traced(*traced.inputs)
            if number:
                yield traced.effects
            traced = next(calls)
    finally:
        snapshot.restore()


def _trace_joint(traced: TracedCall) -> fx.GraphModule:
    """The joint graph, with equal blocks traced once if possible."""
    from autopar._torch_dynamo import aot_export_joint_with_descriptors, kernels_before_formulas

    def attempt() -> fx.GraphModule:
        with contextlib.ExitStack() as stack, fx_traceback.preserve_node_meta():
            stack.enter_context(torch.set_grad_enabled(traced.differentiate))
            # casts made by a trace must not outlive it
            stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
            torch.set_autocast_cache_enabled(False)
            stack.enter_context(_torch.without_effect_tokens())
            # A float32 layer inside of a bfloat16 model has a float32 backward in eager code.
            stack.enter_context(_torch.backward_without_autocast())
            # torch's Python formula of multilabel_margin_loss is wrong where targets follow a -1.
            stack.enter_context(kernels_before_formulas())
            stack.enter_context(without_reentrant_checkpoints())
            stack.enter_context(traced.backward.recording())
            inputs = tuple(traced.inputs)
            joint = aot_export_joint_with_descriptors(
                stack, traced, inputs, decompositions=DECOMPOSITIONS
            ).graph_module
            _torch.forget_code_with(joint)
            if traced.sizes is not None:
                inline_sizes(joint.graph)
            return joint

    if traced.repeats.kinds:
        try:
            module = attempt()
            expand(module.graph)
            return module
        except Exception:  # an error of the model recurs without shared blocks
            if traced.sizes is not None:
                raise
            traced.trace_all_blocks()
    return attempt()


def _random_state() -> tuple[object, ...]:
    numbers: Any = np.random.get_state()
    return random.getstate(), bytes(numbers[1]), numbers[2]


@contextlib.contextmanager
def _explained(model: nn.Module) -> Iterator[None]:
    """Turns errors of tracing into a CaptureError with the user's line."""
    try:
        with _torch.mute_fake_tensor_log():
            yield
    except AutoparError:
        raise
    except Exception as error:
        where, reason = user_frame(error), first_line(error)
        advice = "Express it with tensor operations (torch.where, masks)."
        if isinstance(error, _torch.DataDependentOutputException):
            reason = f"Python needs the value of a tensor ({reason})"
            advice += " For values of an integer argument, name it in static= of autopar.compile."
        elif isinstance(error, _torch.DynamicOutputShapeException):
            reason = f"the shape of a result depends on values ({reason})"
            advice = (
                "Compute on all elements, and leave out by torch.where(mask, x, 0). "
                "Experts: docs/strategies.md#experts."
            )
        raise CaptureError(
            f"cannot capture {type(model).__name__}{where}: {reason}. {advice}"
        ) from error
