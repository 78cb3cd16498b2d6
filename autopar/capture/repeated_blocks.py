"""Repeated blocks are traced once: of equal calls of equal blocks the first, the others copy it.

While a model is traced, the first call of a block of each kind runs between marks, in forward and
backward; calls like it become a single mark. `expansion.expand` puts copies of what lies between
the marks of the first in the place of each of the others. So tracing takes hardly longer for 80
layers than for a few, and everything outside of blocks is traced as it is.

Blocks are equal if all modules in them have the same types, parameters and attributes. Attributes
that differ (the number of the layer) are taken away while the block is traced: if anything reads
them, `BlocksDiffer` or whatever the model raises ends this attempt, and everything is traced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autopar._torch import pytree

MIN_BLOCKS = 4
"""As many equal blocks make it worth while."""

PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
"""Arguments whose equality is all there is to them."""

_library = torch.library.Library("autopar", "DEF")
_library.define("mark(Tensor[] given, Tensor[] like, int[] places, str what, int call) -> Tensor[]")


def _mark(
    given: Sequence[Tensor], like: Sequence[Tensor], places: Sequence[int], what: str, call: int
) -> list[Tensor]:
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in like]


torch.library.register_fake("autopar::mark", _mark)
MARK = torch.ops.autopar.mark.default


class BlocksDiffer(Exception):
    """A repeated block turned out not to be like the first."""


@dataclass
class BlockKind:
    """Blocks that are equal.

    Attributes:
        modules: of each block, its modules in order.
        hidden: attributes in which they differ, by the place of the module.
    """

    modules: list[list[nn.Module]]
    hidden: set[tuple[int, str]] = field(default_factory=set)


@dataclass(frozen=True)
class Traced:
    """The call of a kind that was traced, and what it returned.

    Attributes:
        number: of the call.
        given: its arguments: types of tensors, and everything else.
        structure: how the arguments unflatten.
        returned: the flattened result.
        result: how the result unflattens.
    """

    number: int
    given: tuple[Any, ...]
    structure: Any
    returned: tuple[Any, ...]
    result: Any


class RepeatedBlocks:
    """Marks the calls of repeated blocks of a model while it is traced.

    Args:
        model: whose blocks.
        blocks: names of its repeated blocks.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[str]) -> None:
        kinds: list[BlockKind] = []
        for name in blocks:
            modules = list(model.get_submodule(name).modules())
            if not any(_joins(kind, modules) for kind in kinds):
                kinds.append(BlockKind([modules]))
        self.kinds = [kind for kind in kinds if len(kind.modules) >= MIN_BLOCKS]
        self.traced: dict[int, list[Traced]] = {}
        self.calls = 0

    def columns(self) -> Iterator[tuple[nn.Module, ...]]:
        """Modules that stand at the same place in blocks of one kind."""
        for kind in self.kinds:
            yield from zip(*kind.modules, strict=True)

    @contextlib.contextmanager
    def marking(self) -> Iterator[None]:
        """Marks the calls made inside, of one run of the model."""
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
        """What is called in the place of the forward of a block."""

        def call(*args: Any, **kwargs: Any) -> Any:
            state: dict[str, Tensor] = dict(block.named_parameters(remove_duplicate=False))
            state |= dict(block.named_buffers(remove_duplicate=False))
            leaves, structure = pytree.tree_flatten((state, args, kwargs))
            if any(map(_is_special, block.modules())) or not _are_plain(leaves):
                return forward(*args, **kwargs)
            given = tuple(map(_type, leaves))
            alike = self.traced.setdefault(id(kind), [])
            self.calls += 1
            for known in alike:
                if (known.given, known.structure) == (given, structure):
                    return _repeated(known, self.calls, _tensors(leaves))
            entered = _Border.apply("enter", self.calls, *_tensors(leaves))
            state, args, kwargs = pytree.tree_unflatten(_filled(leaves, entered), structure)
            with _hidden(kind, block), _unchanged(block, entered), _unpatched(block, forward):
                given_state = dict(state)
                result = torch.func.functional_call(block, state, args, kwargs, tie_weights=False)
            if any(state[name] is not tensor for name, tensor in given_state.items()):
                raise BlocksDiffer("a block rebinds a buffer")
            returned, shape = pytree.tree_flatten(result)
            returned = _left(self.calls, returned, entered)
            alike.append(Traced(self.calls, given, structure, tuple(returned), shape))
            return pytree.tree_unflatten(returned, shape)

        return call


def _left(number: int, returned: Sequence[Any], entered: Sequence[Tensor]) -> list[Any]:
    """What a block returned, marked."""
    out = _tensors(returned)
    if not _are_plain(returned) or any(o._base is t for o in out for t in entered):
        raise BlocksDiffer("a block returns something else than new tensors")
    return _filled(returned, _Border.apply("leave", number, *out)) if out else list(returned)


def _joins(kind: BlockKind, modules: list[nn.Module]) -> bool:
    """Whether modules are of a kind; then they become part of it."""
    first = kind.modules[0]
    if [type(m) for m in first] != [type(m) for m in modules]:
        return False
    hidden: set[tuple[int, str]] = set()
    for place, (one, other) in enumerate(zip(first, modules, strict=True)):
        ours, theirs = _attributes(one), _attributes(other)
        if set(ours) != set(theirs) or _shapes(one) != _shapes(other):
            return False
        differ = {key for key in ours if not _equal(ours[key], theirs[key])}
        if not all(type(ours[key]) is type(theirs[key]) is int for key in differ):
            return False
        hidden |= {(place, key) for key in differ}
    kind.modules.append(modules)
    kind.hidden |= hidden
    return True


def _attributes(module: nn.Module) -> dict[str, Any]:
    """What a module holds beside parameters, buffers and other modules."""
    return {k: v for k, v in vars(module).items() if k not in ("_parameters", "_buffers")} | {
        "_modules": tuple(module._modules)
    }


def _shapes(module: nn.Module) -> list[object]:
    own = (*module._parameters.items(), *module._buffers.items())
    return [(n, None if t is None else (t.shape, t.dtype, t.requires_grad)) for n, t in own]


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    same = type(one) is type(other) and not isinstance(one, Tensor)
    return same and isinstance(one, (*PLAIN, tuple, list, dict, set)) and bool(one == other)


def _is_special(module: nn.Module) -> bool:
    """Whether calling a module does more than its forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def _are_plain(leaves: Sequence[Any]) -> bool:
    return all(isinstance(leaf, (Tensor, *PLAIN)) for leaf in leaves)


def _tensors(leaves: Sequence[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _filled(leaves: Sequence[Any], tensors: Sequence[Tensor]) -> list[Any]:
    """Leaves with others in the place of tensors."""
    others = iter(tensors)
    return [next(others) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _type(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return (type(leaf), leaf)
    return (tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad)


@contextlib.contextmanager
def _unpatched(block: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Lets a call of the block run its own forward."""
    patched, block.forward = block.forward, forward
    try:
        yield
    finally:
        block.forward = patched


@contextlib.contextmanager
def _hidden(kind: BlockKind, block: nn.Module) -> Iterator[None]:
    """Takes away the attributes in which blocks of a kind differ."""
    modules = list(block.modules())
    kept = [(modules[place], name, vars(modules[place]).pop(name)) for place, name in kind.hidden]
    try:
        yield
    finally:
        for module, name, value in kept:
            vars(module)[name] = value


@contextlib.contextmanager
def _unchanged(block: nn.Module, entered: Sequence[Tensor]) -> Iterator[None]:
    """Whoever changes a block, or what it is given, would not change that of its copies."""

    def look() -> list[dict[str, Any]]:
        return [{k: id(v) for k, v in vars(m).items() if k != "forward"} for m in block.modules()]

    before, versions = look(), [tensor._version for tensor in entered]
    yield
    if look() != before or versions != [tensor._version for tensor in entered]:
        raise BlocksDiffer("a block changes its attributes, or what it is given")


# -- marks -------------------------------------------------------------------------------------


def _repeated(known: Traced, number: int, tensors: Sequence[Tensor]) -> Any:
    """What a call like a known one returns."""
    like = tuple(_tensors(known.returned))
    made = _Repeat.apply(number, known.number, like, *tensors) if like else ()
    return pytree.tree_unflatten(_filled(known.returned, made), known.result)


class _Border(torch.autograd.Function):
    """Marks what passes the border of a block, and in the backward the gradients that pass it."""

    @staticmethod
    def forward(ctx: Any, what: str, number: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.what, ctx.number = what, number
        made = MARK(tensors, tensors, range(len(tensors)), what, number)
        ctx.set_materialize_grads(False)
        wanted = ctx.needs_input_grad[2:]
        ctx.mark_non_differentiable(*(t for t, need in zip(made, wanted, strict=True) if not need))
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        places = [place for place, gradient in enumerate(gradients) if gradient is not None]
        given = [gradient for gradient in gradients if gradient is not None]
        made = iter(MARK(given, given, places, f"{ctx.what}_back", ctx.number) if given else ())
        return (None, None, *(None if gradient is None else next(made) for gradient in gradients))


class _Repeat(torch.autograd.Function):
    """Stands for a call like one that was traced."""

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
        wanted = ctx.needs_input_grad[3:]
        tensors = ctx.saved_tensors
        like = [t for t, need in zip(tensors, wanted, strict=True) if need]
        places = [place for place, gradient in enumerate(gradients) if gradient is not None]
        places += [-1, *(place for place, need in enumerate(wanted) if need)]
        given = [gradient for gradient in gradients if gradient is not None]
        made = iter(MARK(given, like, places, "repeat_back", ctx.number))
        return (None, None, None, *(next(made) if need else None for need in wanted))
