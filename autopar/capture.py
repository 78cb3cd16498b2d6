"""Capture: one call of a model becomes one joint forward and backward graph with roles.

The model is run once on fake tensors under AOTAutograd, without Dynamo: what torch.export does
by default. Data-dependent Python stops the capture with the user's line in the error; Python
side effects happen once, at capture.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.fx import traceback as fx_traceback

from autopar import _torch
from autopar._torch import pytree
from autopar.containers import flatten, hidden_tensors
from autopar.errors import AutoparError, CaptureError, ModelError, StrategyError
from autopar.expansion import expand
from autopar.graph import (
    Buffer,
    Gradient,
    Input,
    InputRole,
    Output,
    OutputRole,
    Parameter,
    ParameterInfo,
    Tangent,
    TrainingGraph,
    Update,
    dense_strides,
)
from autopar.provenance import Annotate, annotate_nodes, first_line, user_frame
from autopar.repeats import Repeats

TRANSPARENT = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


@dataclass(frozen=True)
class TensorSpec:
    """Shape, dtype, device and differentiability of a tensor, without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool = False
    stride: tuple[int, ...] | None = None

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorSpec:
        """The spec of a tensor (the whole one, for a DTensor)."""
        return TensorSpec(
            tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad, tensor.stride()
        )

    def with_rows(self, rows: int) -> TensorSpec:
        """The spec at another size of dim 0, dims in memory in the same order."""
        shape = (rows, *self.shape[1:])
        stride = None if self.stride is None else dense_strides(shape, self.stride)
        return replace(self, shape=shape, stride=stride)

    def fake(self) -> torch.Tensor:
        """A new tensor of this spec; inside a fake mode it holds no memory."""
        stride = self.stride or torch.empty(self.shape, device="meta").stride()
        return torch.empty_strided(
            self.shape,
            stride,
            dtype=self.dtype,
            device=self.device,
            requires_grad=self.requires_grad,
        )


@dataclass(frozen=True)
class Call:
    """One call of the model: its flattened arguments, tensors as specs, the rest as they are.

    Attributes:
        leaves: flattened arguments; tensors are replaced by `TensorSpec`.
        structure: how (args, kwargs) unflatten.
        has_rows: for each leaf, whether dim 0 runs over the rows of the batch.
    """

    leaves: tuple[Any, ...]
    structure: Any
    has_rows: tuple[bool, ...]

    @property
    def places(self) -> tuple[int, ...]:
        """Where among the leaves the tensors are."""
        return tuple(i for i, leaf in enumerate(self.leaves) if isinstance(leaf, TensorSpec))

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells calls apart, also of arguments that cannot be hashed."""
        leaves = tuple(x if _hashable(x) else repr(x) for x in self.leaves)
        return leaves, self.structure, self.has_rows

    def with_rows(self, rows: int) -> Call:
        """The same call with another number of rows."""
        leaves = tuple(
            leaf.with_rows(rows) if split else leaf
            for leaf, split in zip(self.leaves, self.has_rows, strict=True)
        )
        return replace(self, leaves=leaves)


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


@dataclass(frozen=True)
class Capture:
    """A captured call.

    Attributes:
        graph: the joint graph, or the forward alone when nothing is differentiated.
        leaves: flattened outputs; None in the place of tensors, other values as they are.
        tensor_leaves: which outputs are tensors.
        differentiable: which outputs the model itself would let gradients enter by.
        structure: how the outputs unflatten.
        whole: the graph of the whole batch, where `graph` is one slice's; None where it is whole.
    """

    graph: TrainingGraph
    leaves: tuple[Any, ...]
    tensor_leaves: tuple[bool, ...]
    differentiable: tuple[bool, ...]
    structure: Any
    whole: TrainingGraph | None = None

    @property
    def source(self) -> TrainingGraph:
        """The graph as it was captured."""
        return self.graph if self.whole is None else self.whole


def capture(
    model: nn.Module,
    call: Call,
    parameters: Mapping[str, ParameterInfo],
    *,
    device: torch.device,
    differentiate: bool = True,
    all_tangents: bool = False,
    loss_fn: Callable[..., Any] | None = None,
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

    Raises:
        CaptureError: the model depends on values in Python, or cannot be traced.
        StrategyError: `loss_fn` has parameters of its own.
    """
    if isinstance(loss_fn, nn.Module) and any(p.requires_grad for p in loss_fn.parameters()):
        raise StrategyError(
            f"loss_fn={type(loss_fn).__name__}(...) has parameters, which would not be trained: "
            "make it part of the model and let the model return the loss."
        )
    with _torch.FakeTensorMode(allow_non_fake_inputs=True):
        program = _Program(model, call, parameters, device, all_tangents, loss_fn)
        specs = [leaf for leaf in call.leaves if isinstance(leaf, TensorSpec)]
        inputs = [
            (replace(spec, device=device) if spec.device.type == "meta" else spec).fake()
            for spec in specs
        ]
        if not differentiate:
            program.requires_grad_(False)
            inputs = [tensor.detach() for tensor in inputs]
    random_state = _random_state()
    with _explained(model):
        module = _traced(program, tuple(inputs), differentiate)
    if _random_state() != random_state:
        raise CaptureError(
            f"{type(model).__name__} draws numbers from Python's or numpy's `random` while it "
            "runs; a graph would repeat the first draw for ever. Draw with torch instead."
        )
    graph = _to_training_graph(module, program, parameters)
    return Capture(
        graph, program.leaves, program.tensor_leaves, program.differentiable, program.structure
    )


def _traced(
    program: _Program, inputs: tuple[torch.Tensor, ...], differentiate: bool
) -> fx.GraphModule:
    """The joint graph; repeated blocks are traced once if they turn out to be alike."""

    def attempt() -> fx.GraphModule:
        with contextlib.ExitStack() as stack, fx_traceback.preserve_node_meta():
            stack.enter_context(torch.set_grad_enabled(differentiate))
            stack.enter_context(_without_autocast_cache())
            return _torch.aot_export_joint_with_descriptors(stack, program, inputs).graph_module

    if program.repeats.kinds:
        try:
            module = attempt()
            expand(module.graph)
            return module
        except Exception:  # whatever it is, it counts if it happens without this too
            program.repeats = Repeats(program.model[0], ())
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
    ) -> None:
        super().__init__()
        self.model = (model,)  # in a tuple, so that its own parameters are not this module's
        self.loss_fn = (loss_fn,)
        blocks = dict.fromkeys(info.block for info in parameters.values() if info.block)
        self.repeats = Repeats(model, tuple(blocks))
        self.call, self.all_tangents = call, all_tangents
        self.names = tuple(parameters)
        self.values = nn.ParameterList(
            nn.Parameter(TensorSpec(p.shape, p.dtype, device).fake(), requires_grad=p.requires_grad)
            for p in parameters.values()
        )
        self.buffer_names = tuple(name for name, _ in model.named_buffers())
        for index, (_, buffer) in enumerate(model.named_buffers()):
            fake = TensorSpec(tuple(buffer.shape), buffer.dtype, device).fake()
            self.register_buffer(f"b{index}", fake)
        self.positions = [i for i, x in enumerate(call.leaves) if isinstance(x, TensorSpec)]
        self.leaves: tuple[Any, ...] = ()
        self.tensor_leaves: tuple[bool, ...] = ()
        self.differentiable: tuple[bool, ...] = ()
        self.structure: Any = None

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = list(self.call.leaves)
        for position, tensor in zip(self.positions, tensors, strict=True):
            leaves[position] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.call.structure)
        (model,), (loss_fn,) = self.model, self.loss_fn
        known = dict(zip(self.names, self.values, strict=True))
        known |= {name: getattr(self, f"b{i}") for i, name in enumerate(self.buffer_names)}
        state = {name: known[first] for name, first in _places(model).items()}
        with (
            Annotate(model) as annotate,
            _torch.compiling(),
            _torch.unread_masks(),
            self.repeats.marking(),
        ):
            target = None
            if loss_fn is not None:
                *args, target = args
            result = torch.func.functional_call(
                model, state, tuple(args), kwargs, tie_weights=False
            )
            if loss_fn is not None:
                annotate.module = ""
                result = loss_fn(result, target)
        return self._tensors_of(result)

    def _tensors_of(self, result: Any) -> tuple[torch.Tensor, ...]:
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
        losses = [x for x in outputs if x.requires_grad and x.dim() == 0]
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
        with _torch.quiet_fakes():
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


def _to_training_graph(
    module: fx.GraphModule, program: _Program, parameters: Mapping[str, ParameterInfo]
) -> TrainingGraph:
    """AOTAutograd's joint graph with descriptors as a TrainingGraph with roles."""
    graph = fx.Graph()
    output = graph.output(graph.graph_copy(module.graph, {}))
    old_output = next(iter(reversed(module.graph.nodes)))
    inputs = [n.meta["desc"] for n in graph.find_nodes(op="placeholder")]
    outputs = list(old_output.meta["desc"])
    output.args = (list(output.args[0]),)
    annotate_nodes(graph, parameters)
    for node in [n for n in graph.nodes if n.target in TRANSPARENT]:
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
    training = TrainingGraph(
        graph,
        tuple(_input_role(d, program) for d in inputs),
        (),
        dict(parameters),
        constants={n.target: getattr(module, n.target) for n in graph.find_nodes(op="get_attr")},
        history=(f"captured from {type(program.model[0]).__name__}",),
    )
    kept = [
        (_output_role(d, program), value)
        for d, value in zip(outputs, output.args[0], strict=True)
        if d is not None and isinstance(value, fx.Node)
    ]
    output.args = ([value for _, value in kept],)
    graph.eliminate_dead_code()
    for role, value in kept:
        if value.meta["val"] is not None and value.meta["val"].layout is not torch.strided:
            raise CaptureError(f"{role} is a sparse tensor; use dense ones (sparse=False)")
    training = replace(training, outputs=tuple(role for role, _ in kept))
    _keep_old_values(training)
    return training


def _keep_old_values(graph: TrainingGraph) -> None:
    """Lets the backward read copies of what is updated in place before it runs."""
    updated = {role.of for role in graph.outputs if isinstance(role, Update)}
    first = next(iter(graph.calls()), None)
    for role, node in zip(graph.inputs, graph.placeholders, strict=True):
        late = [u for u in node.users if u.op != "output" and u.meta["phase"] == "backward"]
        if role not in updated or not late or first is None:
            continue
        with graph.graph.inserting_before(first):
            copy = graph.graph.call_function(torch.ops.aten.clone.default, (node,))
        copy.meta = {**node.meta, "phase": "forward", "seq_nr": None}
        for user in late:
            user.replace_input_with(node, copy)


def _input_role(desc: Any, program: _Program) -> InputRole:
    if isinstance(desc, _torch.ParamAOTInput):
        return Parameter(program.names[int(desc.target.removeprefix("values."))])
    if isinstance(desc, _torch.BufferAOTInput):
        return Buffer(program.buffer_names[int(desc.target.removeprefix("b"))])
    if isinstance(desc, _torch.PlainAOTInput):
        return Input(program.positions[desc.idx])
    if isinstance(desc, _torch.TangentAOTInput):
        return Tangent(_output_index(desc.output, program))
    raise CaptureError(
        f"the captured graph has an input that autopar does not know: {desc}. The model probably "
        "returns a view of an argument that it also changes in place; return a copy instead."
    )


def _output_role(desc: Any, program: _Program) -> OutputRole:
    if isinstance(desc, _torch.PlainAOTOutput):
        return Output(_output_index(desc, program))
    if isinstance(desc, _torch.GradAOTOutput):
        of = _input_role(desc.grad_of, program)
        assert isinstance(of, (Parameter, Input))
        return Gradient(of)
    if isinstance(desc, _torch.InputMutationAOTOutput):
        of = _input_role(desc.mutated_input, program)
        if isinstance(of, (Buffer, Input)):
            return Update(of)
    raise CaptureError(
        f"the captured graph has an output that autopar does not know: {desc}. The model probably "
        "changes a parameter in place; do so outside of forward, under torch.no_grad()."
    )


def _output_index(desc: Any, program: _Program) -> int:
    if not isinstance(desc, _torch.PlainAOTOutput):
        raise CaptureError(
            f"the model changes in place what gradients flow into ({type(desc).__name__}): a "
            "parameter, or an input that requires them. Change a copy, or do so outside of forward."
        )
    tensors = [i for i, is_tensor in enumerate(program.tensor_leaves) if is_tensor]
    return tensors[desc.idx]
