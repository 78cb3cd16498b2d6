"""`RepeatedBlocks`: traces equal calls of equal blocks once.

The first call of a block of each kind runs between marks, in forward and backward. Every equal call
becomes a single mark, which `expand` replaces by a copy of the operators between the first's marks.
The time to trace hardly grows with the number of layers.

Blocks are equal if all their modules have the same types, parameters and attributes. Int attributes
may differ (layer numbers); they are removed during the trace. If a block reads one, the model
raises, and the caller traces all blocks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autopar._torch import patched, pytree
from autopar.capture.state.contents import PLAIN

MIN_BLOCKS = 4
"""Fewest equal blocks to share a trace."""

_library = torch.library.Library("autopar", "DEF")
_library.define(
    "mark(Tensor[] inputs, Tensor[] like, int[] indices, str what, int call) -> Tensor[]"
)


def _mark(
    inputs: Sequence[Tensor], like: Sequence[Tensor], indices: Sequence[int], what: str, call: int
) -> list[Tensor]:
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in like]


torch.library.register_fake("autopar::mark", _mark)
MARK = torch.ops.autopar.mark.default


@dataclass(frozen=True, eq=False)
class Constant:
    """A tensor outside of the trace, among the arguments of a block; equal to itself alone."""

    tensor: Tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and other.tensor is self.tensor


@dataclass(frozen=True)
class Passed:
    """An output of a block that is one of its inputs, by the index among their tensors."""

    index: int


class BlocksDiffer(Exception):
    """A repeated block differs from the first of its kind."""


@dataclass
class BlockKind:
    """Modules of equal blocks; `hidden`: differing int attributes, as (index of module, name)."""

    modules: list[list[nn.Module]]
    hidden: set[tuple[int, str]] = field(default_factory=set)


@dataclass(frozen=True)
class TracedBlock:
    """A traced call of a block; tensors among the flattened `inputs` are replaced by types."""

    number: int
    inputs: tuple[Any, ...]
    input_structure: Any
    outputs: list[Any]
    output_structure: Any

    def result(self, outputs: Sequence[Any], tensors: Sequence[Tensor]) -> Any:
        """The result of a call, given its outputs and the tensors among its inputs."""
        found = [tensors[leaf.index] if isinstance(leaf, Passed) else leaf for leaf in outputs]
        return pytree.tree_unflatten(found, self.output_structure)


class RepeatedBlocks:
    """Marks the calls of repeated blocks of a model, given by name, while it is traced."""

    def __init__(self, model: nn.Module, blocks: Sequence[str]) -> None:
        kinds: list[BlockKind] = []
        for name in blocks:
            modules = list(model.get_submodule(name).modules())
            if not any(_joins(kind, modules) for kind in kinds):
                kinds.append(BlockKind([modules]))
        self.kinds = [kind for kind in kinds if len(kind.modules) >= MIN_BLOCKS]
        self.traced: dict[int, list[TracedBlock]] = {}
        self.calls = 0

    def columns(self) -> Iterator[tuple[nn.Module, ...]]:
        for kind in self.kinds:
            yield from zip(*kind.modules, strict=True)

    @contextlib.contextmanager
    def marking(self) -> Iterator[None]:
        self.traced, self.calls = {}, 0
        blocks = [(kind, modules[0]) for kind in self.kinds for modules in kind.modules]
        for kind, block in blocks:
            block.forward = self._marked(kind, block, block.forward)
        try:
            yield
        finally:
            for _, block in blocks:
                del block.forward

    def _marked(self, kind: BlockKind, block: nn.Module, forward: Callable[..., Any]) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            state: dict[str, Tensor] = dict(block.named_parameters(remove_duplicate=False))
            state |= dict(block.named_buffers(remove_duplicate=False))
            leaves, structure = pytree.tree_flatten((state, args, kwargs))
            leaves = [Constant(x) if type(x) is Tensor else x for x in leaves]
            if any(map(_has_hooks, block.modules())) or not _are_plain(leaves):
                return forward(*args, **kwargs)
            inputs = tuple(map(_type, leaves))
            alike = self.traced.setdefault(id(kind), [])
            self.calls += 1
            for known in alike:
                if (known.inputs, known.input_structure) == (inputs, structure):
                    return _repeated(known, self.calls, _tensors(leaves))
            entered = _Border.apply("enter", self.calls, *_tensors(leaves))
            state, args, kwargs = pytree.tree_unflatten(_filled(leaves, entered), structure)
            plain = patched(block, "forward", forward)
            # functional_call calls block.forward, which would mark the block again.
            with _guarded(kind, block, entered), plain:
                before = dict(state)
                result = torch.func.functional_call(block, state, args, kwargs, tie_weights=False)
            if any(state[name] is not tensor for name, tensor in before.items()):
                raise BlocksDiffer("a block rebinds a buffer")
            outputs, output_structure = pytree.tree_flatten(result)
            outputs = [_passed(leaf, entered) for leaf in outputs]
            out = _tensors(outputs)
            if not _are_plain(outputs) or any(o._base is t for o in out for t in entered):
                raise BlocksDiffer("a block returns values other than new tensors")
            if out:
                outputs = _filled(outputs, _Border.apply("leave", self.calls, *out))
            known = TracedBlock(self.calls, inputs, structure, outputs, output_structure)
            alike.append(known)
            return known.result(outputs, _tensors(leaves))

        return call


def _joins(kind: BlockKind, modules: list[nn.Module]) -> bool:
    """Adds a block to a kind if it is equal; returns whether it is."""
    first = kind.modules[0]
    if [type(m) for m in first] != [type(m) for m in modules]:
        return False
    hidden: set[tuple[int, str]] = set()
    for index, (one, other) in enumerate(zip(first, modules, strict=True)):
        ours, theirs = _attributes(one), _attributes(other)
        if set(ours) != set(theirs) or _shapes(one) != _shapes(other):
            return False
        differ = {key for key in ours if not _equal(ours[key], theirs[key])}
        if not all(type(ours[key]) is type(theirs[key]) is int for key in differ):
            return False
        hidden |= {(index, key) for key in differ}
    kind.modules.append(modules)
    kind.hidden |= hidden
    return True


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Attributes of a module, with the names of its children in place of the children."""
    return {k: v for k, v in vars(module).items() if k not in ("_parameters", "_buffers")} | {
        "_modules": tuple(module._modules)
    }


def _shapes(module: nn.Module) -> list[object]:
    own = (*module._parameters.items(), *module._buffers.items())
    return [(n, None if t is None else (t.shape, t.dtype, t.requires_grad)) for n, t in own]


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, functools.partial) and isinstance(other, functools.partial):
        return one.func is other.func and _equal(_given(one), _given(other))
    if type(one) is not type(other):
        return False
    if isinstance(one, (tuple, list)):  # a GRU lists its weights, and tensors are never equal
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    return isinstance(one, (*PLAIN, set)) and bool(one == other)


def _given(function: functools.partial[Any]) -> tuple[Any, ...]:
    """The arguments of a partial function."""
    return (function.args, function.keywords)


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def _are_plain(leaves: Sequence[Any]) -> bool:
    return all(isinstance(leaf, (Tensor, Constant, Passed, *PLAIN)) for leaf in leaves)


def _passed(leaf: Any, entered: Sequence[Tensor]) -> Any:
    """A `Passed` in place of an input; others read it outside of the block."""
    return next((Passed(i) for i, tensor in enumerate(entered) if tensor is leaf), leaf)


def _tensors(leaves: Sequence[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _filled(leaves: Sequence[Any], tensors: Sequence[Tensor]) -> list[Any]:
    others = iter(tensors)
    return [
        next(others)
        if isinstance(leaf, Tensor)
        else leaf.tensor
        if isinstance(leaf, Constant)
        else leaf
        for leaf in leaves
    ]


def _type(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return (type(leaf), leaf)
    return (tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad)


@contextlib.contextmanager
def _guarded(kind: BlockKind, block: nn.Module, entered: Sequence[Tensor]) -> Iterator[None]:
    """Removes attributes that differ between blocks, and raises if the block changes others.

    Copies of the block would not repeat changes of its attributes or inputs.
    """

    def state() -> tuple[object, ...]:
        tables = [vars(module) for module in block.modules()]
        ids = [{k: id(v) for k, v in table.items() if k != "forward"} for table in tables]
        return ids, [tensor._version for tensor in entered]

    modules = list(block.modules())
    removed = [(modules[i], name, vars(modules[i]).pop(name)) for i, name in kind.hidden]
    before = state()
    try:
        yield
        if state() != before:
            raise BlocksDiffer("a block changes its attributes or inputs")
    finally:
        for module, name, value in removed:
            vars(module)[name] = value


# -- marks -------------------------------------------------------------------------------------


def _repeated(known: TracedBlock, number: int, tensors: Sequence[Tensor]) -> Any:
    """The outputs of a call equal to a traced one."""
    like = tuple(_tensors(known.outputs))
    made = _Repeat.apply(number, known.number, like, *tensors) if like else ()
    return known.result(_filled(known.outputs, made), tensors)


class _Border(torch.autograd.Function):
    """Marks tensors that enter or leave a block, and their gradients in the backward."""

    @staticmethod
    def forward(ctx: Any, what: str, number: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.what, ctx.number = what, number
        made = MARK(tensors, tensors, range(len(tensors)), what, number)
        # Zeros for missing gradients would become operators, and `indices` would list them all.
        ctx.set_materialize_grads(False)
        needed = ctx.needs_input_grad[2:]
        ctx.mark_non_differentiable(*(t for t, need in zip(made, needed, strict=True) if not need))
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        indices = [i for i, gradient in enumerate(gradients) if gradient is not None]
        present = [gradient for gradient in gradients if gradient is not None]
        made = iter(
            MARK(present, present, indices, f"{ctx.what}_back", ctx.number) if present else ()
        )
        return (None, None, *(None if gradient is None else next(made) for gradient in gradients))


class _Repeat(torch.autograd.Function):
    """A mark in place of a call equal to a traced one."""

    @staticmethod
    def forward(
        ctx: Any, number: int, known: int, like: Sequence[Tensor], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        made = MARK(tensors, like, [known], "repeat", number)
        ctx.set_materialize_grads(False)
        ctx.number = number
        pairs = zip(made, like, strict=True)
        ctx.mark_non_differentiable(*(one for one, other in pairs if not other.requires_grad))
        ctx.save_for_backward(*tensors)
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        needed = ctx.needs_input_grad[3:]
        tensors = ctx.saved_tensors
        like = [t for t, need in zip(tensors, needed, strict=True) if need]
        indices = [i for i, gradient in enumerate(gradients) if gradient is not None]
        indices += [-1, *(i for i, need in enumerate(needed) if need)]
        present = [gradient for gradient in gradients if gradient is not None]
        made = iter(MARK(present, like, indices, "repeat_back", ctx.number))
        return (None, None, None, *(next(made) if need else None for need in needed))
