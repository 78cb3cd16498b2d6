"""`ConstantValues`: values of tensors of whole numbers that forward makes from numbers alone.

They are the same in every call, so Python may read them, as in the plain model. The trace computes
each beside its traced tensor. It notes how, since a value that was read may depend on sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from autopar._torch import hint_of, pytree
from autopar.capture.values.counted_shapes import (
    count_nonzero,
    count_runs,
    count_unique,
    total,
    with_item,
)
from autopar.capture.values.pure_calls import run_purely, tensors_in
from autopar.capture.values.replay import Step, Value

MOST_ELEMENTS = 2**20
"""Elements of the largest tensor whose values are kept: 8 MiB of int64."""

MOST_WHOLE = 256
"""Up to here bfloat16 holds every integer, so that no device rounds one."""

_FACTORIES = frozenset(
    {torch.tensor, torch.as_tensor, torch.arange, torch.zeros, torch.ones, torch.full}
)
READS = frozenset(
    {
        *(Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__),
        *(Tensor.__contains__, Tensor.item, Tensor.tolist, Tensor.equal),
        *(torch.equal, torch.is_nonzero, count_nonzero, total),
        *(count_unique, count_runs),
    }
)
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_SHAPES_OF_ANOTHER = frozenset({Tensor.view_as, Tensor.reshape_as, Tensor.expand_as})


@dataclass(frozen=True, eq=False)
class _Constant:
    traced: Tensor  # keeps its id from being used again
    version: int
    value: Tensor
    number: int
    of_arguments: bool


class ConstantValues:
    """Constants of a trace, found by their traced tensors.

    In a run that looks for values of arguments, these count too.

    Attributes:
        steps: how the constants came about, and what Python read of them.
        arguments: numbers of the arguments among the tensors of the steps.
    """

    def __init__(self) -> None:
        self._constants: dict[int, _Constant] = {}
        self._count = 0
        self.steps: list[Step] = []
        self.arguments: list[int] = []

    def read(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any] | None:
        """The value that a function reads from constants alone, in a tuple; else None."""
        return self._read(func, args, kwargs, of_arguments=False)

    def read_argument(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any] | None:
        """The value that a function reads from arguments of the call, in a tuple; else None."""
        return self._read(func, args, kwargs, of_arguments=True)

    def _read(self, func: Any, args: Any, kwargs: Any, *, of_arguments: bool) -> tuple[Any] | None:
        tensors = tensors_in((args, kwargs))
        if func not in READS or not self.know(tensors):
            return None
        if self._are_of_arguments(tensors) != of_arguments:
            return None
        read = (self._run(func, args, kwargs),)
        self.steps.append(replace(self._step(func, args, kwargs), read=read))
        return read

    def add_arguments(self, traced: Iterable[Tensor], values: Iterable[Tensor]) -> None:
        """Takes values of arguments for known, each beside its traced tensor."""
        for tensor, value in zip(traced, values, strict=True):
            (number,) = self._keep([tensor], [value], of_arguments=True)
            self.arguments.append(number)

    def follow(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        result: Any,
        *,
        known: bool,
    ) -> None:
        """Computes the values of the traced result of a function of constants.

        `known` is what `know` said of its tensors before it ran.
        """
        if func is _SET_DATA:  # changes no version
            self._constants.pop(id(args[0]), None)
        if func is Tensor.__setitem__:
            func, result = with_item, args[0]
        known = known or (func in _FACTORIES and not tensors_in((args, kwargs)))
        made = tensors_in(result) if known and func not in _SHAPES_OF_ANOTHER else []
        if made and all(map(_is_small, made)):
            self._add(func, args, kwargs, made)

    def _add(self, func: Callable[..., Any], args: Any, kwargs: Any, made: list[Tensor]) -> None:
        tensors = tensors_in((args, kwargs))
        of_arguments = self._are_of_arguments(tensors)
        given = [self._constants[id(tensor)].value for tensor in tensors]
        try:
            values = tensors_in(self._run(func, args, kwargs))
        except Exception:  # an impure function, or a device that is not here
            return
        # `x.data` shares memory with x but no version, so writes through it would go unseen.
        for value in values:
            if any(_writes_unseen(value, other) for other in given):
                return self._forget(value)
        # a call computes with its arguments where they are, but constants are computed here
        if not of_arguments and not run_purely(_are_whole, (values,), {}):
            return
        step = self._step(func, args, kwargs)
        written = [self._constants[id(x)] for x in made if any(x is tensor for tensor in tensors)]
        numbers = self._keep(made, values, of_arguments)
        aliases = dict(
            pair for each in written for pair in self._seen_by_aliases(each, of_arguments)
        )
        self.steps.append(replace(step, results=numbers, writes=bool(written), aliases=aliases))

    def _seen_by_aliases(self, written: _Constant, of_arguments: bool) -> Iterator[tuple[int, int]]:
        """Keeps constants in the memory of one that a step wrote; their old and new numbers.

        They share its count of versions, and were known if they are as far behind as it was.
        """
        writes = written.traced._version - written.version
        place = written.value.untyped_storage().data_ptr()
        for other in list(self._constants.values()):
            is_behind = other.version + writes == other.traced._version
            if is_behind and other.value.untyped_storage().data_ptr() == place:
                depends = other.of_arguments or of_arguments
                (number,) = self._keep([other.traced], [other.value], depends)
                yield other.number, number

    def _keep(
        self, traced: Sequence[Tensor], values: Sequence[Tensor], of_arguments: bool
    ) -> tuple[int, ...]:
        """Keeps values of traced tensors; the numbers that they get."""
        numbers = tuple(range(self._count, self._count + len(traced)))
        self._count += len(traced)
        for tensor, value, number in zip(traced, values, numbers, strict=True):
            known = _Constant(tensor, tensor._version, value, number, of_arguments)
            self._constants[id(tensor)] = known
        return numbers

    def _forget(self, value: Tensor) -> None:
        """Forgets the constants in the memory of a value."""
        place = value.untyped_storage().data_ptr()
        for key, constant in list(self._constants.items()):
            if constant.value.untyped_storage().data_ptr() == place:
                del self._constants[key]

    def know(self, tensors: Sequence[Tensor]) -> bool:
        """Whether all tensors, of one or more, are constants that nothing has written since."""
        found = [self._constants.get(id(tensor)) for tensor in tensors]
        return bool(found) and all(x is not None and x.version == x.traced._version for x in found)

    def _are_of_arguments(self, tensors: Sequence[Tensor]) -> bool:
        return any(self._constants[id(tensor)].of_arguments for tensor in tensors)

    def _run(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        def concrete(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return self._constants[id(leaf)].value
            return hint_of(leaf) if isinstance(leaf, torch.SymInt) else _on_cpu(leaf)

        args, kwargs = pytree.tree_map(concrete, (args, dict(kwargs)))
        return run_purely(func, args, kwargs)

    def _step(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Step:
        def described(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return Value(self._constants[id(leaf)].number)
            return _on_cpu(leaf)

        args, kwargs = pytree.tree_map(described, (args, dict(kwargs)))
        return Step(func, args, kwargs)


def _writes_unseen(value: Tensor, other: Tensor) -> bool:
    """Whether writing one tensor changes another whose version does not tell."""
    place = value.untyped_storage().data_ptr()
    if not place or place != other.untyped_storage().data_ptr():  # tensors of nothing have 0
        return False
    before = other._version
    torch.autograd.graph.increment_version(value)
    return other._version == before


def _on_cpu(leaf: Any) -> Any:
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


def _are_whole(values: Sequence[Tensor]) -> bool:
    """Whether every device computes the same: integers, and floats that are small integers."""
    floats = [value for value in values if value.is_floating_point()]
    return all(bool(((x == x.round()) & (x.abs() <= MOST_WHOLE)).all()) for x in floats)


def _is_small(tensor: Tensor) -> bool:
    if tensor.is_complex():
        return False
    elements = 1
    for size in tensor.shape:
        elements *= hint_of(size)
    return elements <= MOST_ELEMENTS
