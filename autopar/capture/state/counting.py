"""`Count`: a whole number that forward may count up while it is traced, and not use."""

from __future__ import annotations

import sys
from typing import Any

from autopar.capture.provenance import is_library


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


USES = (
    "bool int index float complex hash str repr format neg pos abs invert eq ne lt le gt ge mul "
    "rmul truediv rtruediv floordiv rfloordiv mod rmod divmod rdivmod pow rpow rsub and rand or "
    "ror xor rxor lshift rlshift rshift rrshift round"
)
"""Methods of int, without their underscores, that need the number itself."""

for _name in USES.split():
    setattr(Count, f"__{_name}__", _used(f"__{_name}__"))
