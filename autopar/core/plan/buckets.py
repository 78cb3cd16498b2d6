"""`Buckets`: parameters and gradients that share one collective."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Group = tuple[str, ...]
"""Names of the parameters of one bucket."""

BUCKET_BYTES = 4 * 2**20
"""Default size of a bucket, in bytes."""


@dataclass(frozen=True)
class Buckets:
    """Parameters of each bucket, in the order of issue.

    Attributes:
        gather: all-gathers of the forward.
        regather: all-gathers of the backward.
        reduce: reductions of gradients.
    """

    gather: tuple[Group, ...] = ()
    regather: tuple[Group, ...] = ()
    reduce: tuple[Group, ...] = ()

    def renamed(self, names: Mapping[str, str]) -> Buckets:
        """The same buckets with renamed parameters."""

        def rename(groups: tuple[Group, ...]) -> tuple[Group, ...]:
            return tuple(tuple(names.get(name, name) for name in group) for group in groups)

        return Buckets(rename(self.gather), rename(self.regather), rename(self.reduce))

    def joined(self, other: Buckets) -> Buckets:
        """These buckets, then the buckets of `other` without parameters already in these."""

        def join(first: tuple[Group, ...], second: tuple[Group, ...]) -> tuple[Group, ...]:
            known = {name for group in first for name in group}
            left = (tuple(n for n in group if n not in known) for group in second)
            return (*first, *filter(None, left))

        return Buckets(
            join(self.gather, other.gather),
            join(self.regather, other.regather),
            join(self.reduce, other.reduce),
        )
