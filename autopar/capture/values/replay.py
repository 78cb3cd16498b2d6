"""`Replay`: the steps by which values that Python read follow from numbers and arguments.

They are run again, in their order, where the values may be others: at other sizes of a call, or
with other arguments. Order matters, since a step may change a tensor in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autopar._torch import pytree
from autopar.capture.symbolic_sizes import evaluated
from autopar.capture.values.pure_calls import tensors_in


@dataclass(frozen=True)
class Value:
    """Stands for a tensor of a replay among the arguments of a step."""

    number: int


@dataclass(frozen=True)
class Step:
    """A call of a function, whose tensors are a `Value` each and whose sizes may be symbols.

    Attributes:
        results: numbers of the tensors in its result.
        read: what Python got, in a tuple; None for a step that only computes.
        writes: whether it changes an argument in place.
        aliases: new numbers, by old ones, of tensors that see this.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[int, ...] = ()
    read: tuple[Any] | None = None
    writes: bool = False
    aliases: Mapping[int, int] = field(default_factory=dict)

    @property
    def made(self) -> set[int]:
        return {*self.results, *self.aliases.values()}

    @property
    def operands(self) -> set[int]:
        leaves = pytree.tree_leaves((self.args, dict(self.kwargs)))
        return {leaf.number for leaf in leaves if isinstance(leaf, Value)} | {*self.aliases}

    def run(self, values: Mapping[int, Tensor], binding: Mapping[Any, int]) -> Any:
        """Its result for tensors by number, with sizes for symbols."""

        def concrete(leaf: Any) -> Any:
            if isinstance(leaf, Value):
                return values[leaf.number]
            if isinstance(leaf, torch.SymInt):
                return evaluated([leaf.node.expr], binding)[0]
            return leaf

        args, kwargs = pytree.tree_map(concrete, (self.args, dict(self.kwargs)))
        return self.func(*args, **kwargs)


@dataclass(frozen=True)
class Replay:
    """Steps of one run, in order.

    Attributes:
        arguments: places of the tensor arguments that they use, by number.
    """

    steps: tuple[Step, ...] = ()
    arguments: Mapping[int, int] = field(default_factory=dict)

    @staticmethod
    def of(steps: Sequence[Step], arguments: Sequence[int] = ()) -> Replay:
        """Those of the steps that a read follows from; `arguments` are numbers of tensors."""
        needed: set[int] = set()
        kept: list[Step] = []
        for step in reversed(steps):
            if step.read is not None or needed.intersection(step.made):
                needed |= step.operands
                kept.append(step)
        places = {number: i for i, number in enumerate(arguments) if number in needed}
        return Replay(tuple(reversed(kept)), places)

    def holds(self, binding: Mapping[Any, int], tensors: Sequence[Tensor] = ()) -> bool:
        """Whether Python reads the same at these sizes of symbols, from these arguments."""
        writes = any(step.writes for step in self.steps)
        values: dict[int, Tensor] = {}
        for number, place in self.arguments.items():
            value = tensors[place].detach()
            values[number] = value.clone() if writes else value
        with torch.no_grad():
            for step in self.steps:
                result = step.run(values, binding)
                if step.read is not None and not _same(result, step.read[0]):
                    return False
                if step.read is None:
                    values.update(zip(step.results, tensors_in(result), strict=True))
                values.update({new: values[old] for old, new in step.aliases.items()})
        return True


NO_STEPS = Replay()


def _same(one: Any, other: Any) -> bool:
    """Whether two values are equal, of one type: True is not 1."""
    return type(one) is type(other) and bool(one == other)
