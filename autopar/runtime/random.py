"""Each rank's own stream of random numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class RandomStream:
    """Draws for this rank's rows, independent of other ranks' and reproducible from a seed.

    With one rank it is torch's default generator, so that results are those of the plain model.
    With more, it is seeded by this process's `torch.initial_seed()` and the rank, at its first use.
    """

    def __init__(self, rank: int, ranks: int, device: torch.device) -> None:
        self.own = ranks > 1
        self.rank, self.device = rank, device
        self.state: torch.Tensor | None = None

    def get(self) -> torch.Tensor:
        """The state of the stream."""
        if not self.own:
            return self._default_state()
        if self.state is None:
            self.state = self._seeded()
        return self.state.clone()

    def set(self, state: torch.Tensor) -> None:
        """Continues from a state."""
        if self.own:
            self.state = state.clone()
        else:
            self._set_default(state)

    @contextlib.contextmanager
    def during(self, needed: bool) -> Iterator[None]:
        """Makes this stream torch's default one."""
        if not (needed and self.own):
            yield
            return
        outside = self._default_state()
        self._set_default(self.get())
        try:
            yield
        finally:
            self.state = self._default_state()
            self._set_default(outside)

    def _seeded(self) -> torch.Tensor:
        generator = torch.Generator(self.device)
        generator.manual_seed((torch.initial_seed() * 1_000_003 + self.rank) % 2**63)
        return generator.get_state()

    def _default_state(self) -> torch.Tensor:
        if self.device.type == "cuda":
            return torch.cuda.get_rng_state(self.device)
        return torch.get_rng_state()

    def _set_default(self, state: torch.Tensor) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state, self.device)
        else:
            torch.set_rng_state(state)
