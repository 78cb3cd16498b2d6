"""`Count`: a whole number that a model may count up while it is traced, and do nothing else with."""

from __future__ import annotations

import sys
from typing import Any

from autopar.provenance import is_library


class Count:
    """Stands for an int attribute; any use beside adding whole numbers is noted.

    Args:
        value: the number that it stands for.
        uses: list that grows when the number is used.
    """

    def __init__(self, value: int, uses: list[str]) -> None:
        self._value, self._uses = value, uses

    def __add__(self, other: Any) -> Any:
        if type(other) is int:
            return Count(self._value + other, self._uses)
        return self.use("+") + other

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        if type(other) is int:
            return Count(self._value - other, self._uses)
        return self.use("-") - other

    def use(self, how: str) -> int:
        """The number, which something needs."""
        self._uses.append(how)
        return self._value

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The type that `isinstance` is told: nn.Module asks too, and does nothing by it."""
        if not is_library(sys._getframe(1).f_code.co_filename):
            self.use("isinstance")
        return int

    @property
    def counted(self) -> int:
        """The number, for whoever ends the count."""
        return self._value


def _used(name: str) -> Any:
    def method(self: Count, *args: Any) -> Any:
        return getattr(self.use(name), name)(*args)

    return method


for _name in (
    "__bool__ __int__ __index__ __float__ __complex__ __hash__ __str__ __repr__ __format__ __neg__ "
    "__pos__ __abs__ __invert__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __mul__ __rmul__ "
    "__truediv__ __rtruediv__ __floordiv__ __rfloordiv__ __mod__ __rmod__ __divmod__ __rdivmod__ "
    "__pow__ __rpow__ __rsub__ __and__ __rand__ __or__ __ror__ __xor__ __rxor__ __lshift__ "
    "__rlshift__ __rshift__ __rrshift__ __round__"
).split():
    setattr(Count, _name, _used(_name))
