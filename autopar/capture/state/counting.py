"""`CounterProxy`: stands in for an int attribute that forward may only increment."""

from __future__ import annotations

import sys
from typing import Any

from autopar.capture.provenance import is_library


class CounterProxy:
    """An int that records every use other than adding or subtracting whole numbers.

    Args:
        value: the number.
        uses: names of the operations that needed the number; appended to.
    """

    def __init__(self, value: int, uses: list[str]) -> None:
        self._value, self._uses = value, uses

    def __add__(self, other: Any) -> Any:
        if type(other) is int:
            return CounterProxy(self._value + other, self._uses)
        return self.use("+") + other

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        if type(other) is int:
            return CounterProxy(self._value - other, self._uses)
        return self.use("-") - other

    def use(self, operation: str) -> int:
        """The number, for an operation that depends on it."""
        self._uses.append(operation)
        return self._value

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """`int`, for `isinstance`; torch's own checks in nn.Module do not count as a use."""
        if not is_library(sys._getframe(1).f_code.co_filename):
            self.use("isinstance")
        return int

    @property
    def value(self) -> int:
        """The number, without recording a use."""
        return self._value


def _recorded(name: str) -> Any:
    def method(self: CounterProxy, *args: Any) -> Any:
        return getattr(self.use(name), name)(*args)

    return method


USES = (
    "bool int index float complex hash str repr format neg pos abs invert eq ne lt le gt ge mul "
    "rmul truediv rtruediv floordiv rfloordiv mod rmod divmod rdivmod pow rpow rsub and rand or "
    "ror xor rxor lshift rlshift rshift rrshift round"
)
"""Methods of int, without underscores, whose result depends on the number."""

for _name in USES.split():
    setattr(CounterProxy, f"__{_name}__", _recorded(f"__{_name}__"))
