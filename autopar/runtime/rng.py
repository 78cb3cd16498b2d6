"""`RandomStream`: each rank's own stream of random numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from autopar.core.common.world import rank
from autopar.runtime.agreement.consensus import broadcast_from_rank0
from autopar.runtime.options import Options


def keep_random_state(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Leaves torch's default generators as they are, so that users draw as on one device."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


class RandomStream:
    """Random numbers for this rank's rows, independent of other ranks' and reproducible.

    A single rank uses torch's default generator, so that results match the plain model. Several
    ranks seed the stream at its first use from the seed of the device's default generator and their
    index. Ranks that share a model draw the same numbers, seeded by the first rank of the world.
    Ranks with different pipeline stages draw different numbers.
    """

    def __init__(self, options: Options, device: torch.device) -> None:
        self.shared = options.model_parallel_size > 1
        self.count = options.groups * options.ranks // options.model_parallel_size
        self.is_separate = self.count > 1 or self.shared
        index = options.group * options.ranks + (rank() if options.ranks > 1 else 0)
        self.index = index // options.model_parallel_size
        self.device = device
        self.state: torch.Tensor | None = None

    def get_state(self) -> torch.Tensor:
        if not self.is_separate:
            return self._default_state()
        if self.state is None:
            self.state = self._seeded(self._default_seed())
        return self.state.clone()

    def set_state(self, state: torch.Tensor) -> None:
        if self.is_separate:
            self.state = state.clone()
        else:
            self._set_default(state)

    @contextlib.contextmanager
    def as_default(self, needed: bool) -> Iterator[None]:
        """Makes this stream torch's default generator inside the context, if `needed`."""
        if not (needed and self.is_separate):
            yield
            return
        outer = self._default_state()
        if self.shared and self.state is None:
            self.state = self._shared_state()
        self._set_default(self.get_state())
        try:
            yield
        finally:
            self.state = self._default_state()
            self._set_default(outer)

    def current_state(self) -> torch.Tensor:
        """The state that the next draw inside `as_default` takes."""
        return self._default_state()

    @contextlib.contextmanager
    def replayed(self, state: torch.Tensor | None) -> Iterator[None]:
        """Draws inside as from an earlier `current_state`, if there is one."""
        if state is None:
            yield
            return
        outer = self._default_state()
        self._set_default(state)
        try:
            yield
        finally:
            self._set_default(outer)

    def _seeded(self, seed: int) -> torch.Tensor:
        generator = torch.Generator(self.device)
        # seed + index would give rank 1 under one seed the stream of rank 0 under the next
        generator.manual_seed((seed * 1_000_003 + self.index) % 2**63)
        return generator.get_state()

    def _shared_state(self) -> torch.Tensor:
        """The first state, from the seed or the default generator of rank 0."""
        seed, state = broadcast_from_rank0(lambda: (self._default_seed(), self._default_state()))
        return self._seeded(seed) if self.count > 1 else state

    def _default_seed(self) -> int:
        if self.device.type != "cuda":
            return torch.initial_seed()
        with torch.cuda.device(self.device):
            return torch.cuda.initial_seed()

    def _default_state(self) -> torch.Tensor:
        if self.device.type == "cuda":
            return torch.cuda.get_rng_state(self.device)
        return torch.get_rng_state()

    def _set_default(self, state: torch.Tensor) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state, self.device)
        else:
            torch.set_rng_state(state)
