"""`States`: what compression keeps from one step to the next on this rank."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from autopar.graph import State


@dataclass
class States:
    """Tensors by their role, made when they are first asked for; programs write them in place.

    Attributes:
        known: of each role.
    """

    known: dict[State, torch.Tensor] = field(default_factory=dict)

    def of(self, role: State, like: torch.Tensor) -> torch.Tensor:
        """What is kept for a role: at first nothing, and factors that are the same on all ranks.

        One that was kept in another shape, as under a compression of another rank, is let go.
        """
        found = self.known.get(role)
        if found is None or found.shape != like.shape:
            found = self.known[role] = first(role, like).to(like.device)
        if found.dtype != like.dtype:
            found = self.known[role] = found.to(like.dtype)
        return found

    def copied(self) -> States:
        """The same, in tensors of its own."""
        return States({role: tensor.clone() for role, tensor in self.known.items()})

    def reset(self) -> None:
        """Forgets everything: what was not sent is lost."""
        self.known.clear()

    def __iter__(self) -> Iterator[tuple[State, torch.Tensor]]:
        return iter(sorted(self.known.items(), key=lambda item: (item[0].name, item[0].kind)))

    def load(self, values: Mapping[State, torch.Tensor]) -> None:
        """Takes what was saved; what it lacks starts anew."""
        self.known = dict(values)


def first(role: State, like: torch.Tensor) -> torch.Tensor:
    """What is kept before the first step."""
    if role.kind != "factor":
        return torch.zeros(like.shape, dtype=like.dtype)
    seed = zlib.crc32(role.name.encode())
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, dtype=like.dtype, generator=generator)
