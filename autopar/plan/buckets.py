"""`Buckets`: parameters and gradients whose collectives travel together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Group = tuple[str, ...]


BUCKET_BYTES = 4 * 2**20
"""Of a bucket, where nothing else is said."""


@dataclass(frozen=True)
class Buckets:
    """Which parameters travel together, in the order in which they do.

    Attributes:
        gather: gathers of the forward.
        regather: gathers of the backward.
        reduce: reductions of gradients.
    """

    gather: tuple[Group, ...] = ()
    regather: tuple[Group, ...] = ()
    reduce: tuple[Group, ...] = ()

    def renamed(self, names: Mapping[str, str]) -> Buckets:
        """The same buckets of parameters of other names."""

        def other(groups: tuple[Group, ...]) -> tuple[Group, ...]:
            return tuple(tuple(names.get(name, name) for name in group) for group in groups)

        return Buckets(other(self.gather), other(self.regather), other(self.reduce))
