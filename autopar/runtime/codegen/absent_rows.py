"""`AbsentRows`: stands for logits that a program leaves out of its outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from autopar._torch import pytree
from autopar.errors import StrategyError
from autopar.ir.graph import TrainingGraph, tensors
from autopar.ir.roles import Output

READS = (
    "add and bool bytes contains delitem eq float floordiv ge getitem gt index int invert iter le "
    "len lt matmul mod mul ne neg or pos pow radd rand rfloordiv rmatmul rmod rmul ror rpow rsub "
    "rtruediv rxor setitem sub truediv xor array dlpack complex abs"
)
"""Python's operators that would read a tensor."""


class AbsentRowsError(StrategyError, AttributeError):
    """An output that is left out was read; also an AttributeError, so that `hasattr` answers."""


class AbsentRows:
    """An output that is never whole on a rank, because the loss is computed in chunks of its rows.

    It has a shape and no values: whatever reads it raises a StrategyError.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        # a public dtype would make accelerate take it for a tensor, and cast it
        self.shape, self._dtype = torch.Size(shape), dtype

    def __repr__(self) -> str:
        return f"AbsentRows(shape={tuple(self.shape)}, dtype={self._dtype})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "shape" not in vars(self):
            raise AttributeError(name)  # protocols of Python, such as copying
        raise self._error(f".{name}")

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Iterable[Any] = (), kwargs: Any = None
    ) -> NoReturn:
        found = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, cls)]
        raise found[0]._error(f" in {getattr(function, '__name__', function)}")

    def _error(self, where: str) -> AbsentRowsError:
        return AbsentRowsError(
            f"an output of shape {tuple(self.shape)} is read{where}, but the plan computes the "
            "loss in chunks of its rows, and leaves it out. Give Strategy(loss_chunks=1) to have "
            "it, or call the model in evaluation under torch.no_grad()"
        )


def _reading(name: str) -> Callable[..., NoReturn]:
    def read(self: AbsentRows, *others: object) -> NoReturn:
        raise self._error(f" by __{name}__")

    return read


for _name in READS.split():
    setattr(AbsentRows, f"__{_name}__", _reading(_name))
AbsentRows.__hash__ = object.__hash__  # type: ignore[method-assign]


def with_absent_rows(
    leaves: Sequence[Any], captured: TrainingGraph, lowered: TrainingGraph
) -> tuple[Any, ...]:
    """The outputs of a call, with a stand-in for each tensor that the program leaves out."""
    found: Mapping[Any, Any] = dict(zip(captured.outputs, captured.results, strict=True))
    leaves = list(leaves)
    for role in set(captured.outputs).difference(lowered.outputs):
        if isinstance(role, Output) and (node := found[role]) is not None:
            (fake,) = tensors(node)
            leaves[role.index] = AbsentRows(fake.shape, fake.dtype)
    return tuple(leaves)
