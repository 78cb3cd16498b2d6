"""`ConstantDraws`: replaces random operators by constants, so that two programs agree."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from autopar._torch import FakeTensor, FunctionalTensor, TorchDispatchMode, pytree

aten = torch.ops.aten


class ConstantDraws(TorchDispatchMode):
    """Replaces random numbers by constants inside the context, in the backward too.

    Dropout keeps and scales every element. Uniform numbers are the middle of their range, normal
    numbers half a deviation above the mean, integers the lowest, permutations the identity. These
    values do not depend on sharding, and generators stay as they are. Captures see the operators
    unchanged.

    Attributes:
        names: replaced operators, in the order of their first call.
        narrowest: least precise dtype that a floating-point tensor was cast to, or None.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, None] = {}
        self.narrowest: torch.dtype | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if _is_abstract(args, kwargs):
            return func(*args, **kwargs)
        named = _named(func, args, kwargs)
        if any(isinstance(named.get(name), float) and named[name] for name in _RATES):
            self.names[_base_name(func)] = None
            args, kwargs = _without_dropout(func, named)
        elif torch.Tag.nondeterministic_seeded in func.tags and _draws(func, named):
            self.names[_base_name(func)] = None
            return _constant(func, args, kwargs, named)
        result = func(*args, **kwargs)
        if func is aten._to_copy.default:
            self._note_cast(args[0].dtype, result.dtype)
        return result

    def _note_cast(self, before: torch.dtype, after: torch.dtype) -> None:
        if not (before.is_floating_point and after.is_floating_point):
            return
        known = torch.finfo(self.narrowest or before).eps
        if torch.finfo(after).eps > max(known, torch.finfo(before).eps):
            self.narrowest = after


_RATES = ("dropout_p", "dropout")
"""Dropout arguments of fused attention and of RNNs."""


def _is_abstract(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the operator runs in a capture, on tensors without values."""
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    on_meta = str(kwargs.get("device")) == "meta"
    return on_meta or any(
        isinstance(t, (FakeTensor, FunctionalTensor)) or t.device.type == "meta" for t in tensors
    )


def _named(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    schema = func._schema.arguments
    found = {argument.name: argument.default_value for argument in schema}
    found |= {argument.name: value for argument, value in zip(schema, args, strict=False)}
    return found | dict(kwargs)


def _without_dropout(func: Any, named: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    off = dict(named) | {name: 0.0 for name in _RATES if name in named}
    schema = func._schema.arguments
    args = tuple(off[a.name] for a in schema if not a.kwarg_only)
    return args, {a.name: off[a.name] for a in schema if a.kwarg_only}


def _draws(func: Any, named: Mapping[str, Any]) -> bool:
    if any(name in named for name in _RATES):
        return False
    return named.get("train") is not False and named.get("training") is not False


def _base_name(func: Any) -> str:
    """`aten::bernoulli_.float` -> `bernoulli`."""
    return str(func.overloadpacket).rpartition(".")[2].rstrip("_")


def _constant(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], named: Mapping[str, Any]
) -> Any:
    name = _base_name(func)
    if name == "native_dropout":
        value, rate = named["input"], named["p"]
        scale = 1.0 / (1.0 - rate) if rate < 1 else 0.0
        return value * scale, torch.full_like(value, rate < 1, dtype=torch.bool)
    with _generator_kept(named):
        result = func(*args, **kwargs)
    if isinstance(result, torch.Tensor):
        middle = 0.5 if result.is_floating_point() else 1
        value = _VALUES[name](named, result) if name in _VALUES else middle
        result.copy_(torch.as_tensor(value, device=result.device))
    return result


@contextlib.contextmanager
def _generator_kept(named: Mapping[str, Any]) -> Iterator[None]:
    """Leaves generators as they are: the loop may draw its next batch by the same one."""
    own = named.get("generator")
    before = own.get_state() if own is not None else None
    devices = {x.device for x in named.values() if isinstance(x, torch.Tensor) and x.is_cuda}
    with torch.random.fork_rng(devices=devices):
        yield
    if own is not None:
        own.set_state(before)


def _bernoulli(named: Mapping[str, Any], result: torch.Tensor) -> Any:
    rate = named.get("p")
    rate = named["self"] if rate is None else rate
    return torch.as_tensor(rate) > 0


def _normal(named: Mapping[str, Any], result: torch.Tensor) -> Any:
    return named["mean"] + named["std"] / 2


def _lowest(named: Mapping[str, Any], result: torch.Tensor) -> Any:
    return named.get("low", named.get("from")) or 0


def _in_order(named: Mapping[str, Any], result: torch.Tensor) -> Any:
    return torch.arange(result.shape[-1], device=result.device)


_VALUES: Mapping[str, Callable[[Mapping[str, Any], torch.Tensor], Any]] = {
    "bernoulli": _bernoulli,
    "uniform": lambda named, _: (named["from"] + named["to"]) / 2,
    "normal": _normal,
    "normal_functional": _normal,
    "random": _lowest,
    "randint": _lowest,
    "randint_like": _lowest,
    "randperm": _in_order,
    "multinomial": lambda named, result: _in_order(named, result) % named["self"].shape[-1],
}
