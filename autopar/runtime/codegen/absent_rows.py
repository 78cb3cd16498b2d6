"""`AbsentRows`: stands for logits that a program leaves out of its outputs.

It shows nothing of them, not even a shape: a rank's program has the rows of this rank alone, and
whoever counts by them would count those.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NoReturn

from autopar._torch import pytree
from autopar.core.ir.graph import TrainingGraph
from autopar.core.ir.roles import Output, OutputRole
from autopar.errors import StrategyError

READS = (
    "add and bool bytes contains delitem eq float floordiv ge getitem gt index int invert iter le "
    "len lt matmul mod mul ne neg or pos pow radd rand rfloordiv rmatmul rmod rmul ror rpow rsub "
    "rtruediv rxor setitem sub truediv xor array dlpack complex abs dlpack_device format round "
    "lshift rshift rlshift rrshift divmod rdivmod reversed iadd isub imul itruediv ifloordiv imod "
    "ipow imatmul iand ior ixor reduce_ex"
)
"""Python's operators and protocols that would read a tensor, pickling among them."""


class AbsentRowsError(StrategyError, AttributeError):
    """An output that is left out was read; also an AttributeError, so that `hasattr` answers."""


class AbsentRows:
    """An output that is never whole on a rank, because the loss is computed in chunks of its rows.

    Whatever reads or changes it raises a StrategyError.
    """

    def __init__(self, index: int) -> None:
        vars(self)["_index"] = index

    def __repr__(self) -> str:
        return f"AbsentRows(output {self._index})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_index" not in vars(self):
            raise AttributeError(name)  # protocols of Python, such as copying
        raise self._error(f".{name}")

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise self._error(f".{name}")

    def __copy__(self) -> AbsentRows:
        return self

    def __deepcopy__(self, memo: Any) -> AbsentRows:
        return self

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Iterable[Any] = (), kwargs: Any = None
    ) -> NoReturn:
        found = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, cls)]
        raise found[0]._error(f" in {getattr(function, '__name__', function)}")

    def _error(self, where: str) -> AbsentRowsError:
        return AbsentRowsError(
            f"output {self._index} of the model is read{where}, but the plan computes the loss in "
            "chunks of its rows, and leaves it out. Give Strategy(loss_chunks=1) to have it, or "
            "call the model in evaluation under torch.no_grad()"
        )


def _reading(name: str) -> Callable[..., NoReturn]:
    def read(self: AbsentRows, *others: object) -> NoReturn:
        raise self._error(f" by __{name}__")

    return read


for _name in READS.split():
    setattr(AbsentRows, f"__{_name}__", _reading(_name))
AbsentRows.__hash__ = object.__hash__  # type: ignore[method-assign]


def with_absent_rows(
    leaves: Sequence[Any], captured: TrainingGraph, returned: Collection[OutputRole]
) -> tuple[Any, ...]:
    """The outputs of a call, with a stand-in for each tensor that no program returns."""
    leaves = list(leaves)
    for role, node in zip(captured.outputs, captured.results, strict=True):
        if isinstance(role, Output) and node is not None and role not in returned:
            leaves[role.index] = AbsentRows(role.index)
    return tuple(leaves)
