"""Each rank's own stream of random numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from autopar.runtime.agreement.consensus import broadcast_from_rank0
from autopar.runtime.options import Options
from autopar.runtime.process_groups import rank


class RandomStream:
    """Draws for this rank's rows, independent of other ranks' and reproducible from a seed.

    With one rank it is torch's default generator, so that results are those of the plain model.
    With more, it is seeded by this process's `torch.initial_seed()` and the rank, at its first use.
    Ranks that share a model draw the same: as the first rank of the world would, for their rows.
    Those that run different stages of it draw different ones.

    Args:
        rank: among those that have different rows, or different stages.
        ranks: how many there are of these.
        device: on which numbers are drawn.
        shared: whether several ranks have the same rows of the same stages.
    """

    def __init__(
        self, rank: int, ranks: int, device: torch.device, *, shared: bool = False
    ) -> None:
        self.own, self.ranks, self.shared = ranks > 1 or shared, ranks, shared
        self.rank, self.device = rank, device
        self.state: torch.Tensor | None = None

    def get_state(self) -> torch.Tensor:
        """The state of the stream."""
        if not self.own:
            return self._default_state()
        if self.state is None:
            self.state = self._seeded(torch.initial_seed())
        return self.state.clone()

    def set_state(self, state: torch.Tensor) -> None:
        """Continues from a state."""
        if self.own:
            self.state = state.clone()
        else:
            self._set_default(state)

    @contextlib.contextmanager
    def as_default(self, needed: bool) -> Iterator[None]:
        """Makes this stream torch's default one."""
        if not (needed and self.own):
            yield
            return
        outside = self._default_state()
        if self.shared and self.state is None:
            self.state = self._agreed()
        self._set_default(self.get_state())
        try:
            yield
        finally:
            self.state = self._default_state()
            self._set_default(outside)

    def _seeded(self, seed: int) -> torch.Tensor:
        generator = torch.Generator(self.device)
        generator.manual_seed((seed * 1_000_003 + self.rank) % 2**63)
        return generator.get_state()

    def _agreed(self) -> torch.Tensor:
        """The stream as the first rank of the world has it."""
        seed, state = broadcast_from_rank0(lambda: (torch.initial_seed(), self._default_state()))
        return self._seeded(seed) if self.ranks > 1 else state

    def _default_state(self) -> torch.Tensor:
        if self.device.type == "cuda":
            return torch.cuda.get_rng_state(self.device)
        return torch.get_rng_state()

    def _set_default(self, state: torch.Tensor) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state, self.device)
        else:
            torch.set_rng_state(state)


def stream_of(options: Options, device: torch.device) -> RandomStream:
    """The random numbers of this rank's rows and stage."""
    models = options.ranks // options.model_parallel_size
    own = rank() // options.model_parallel_size if options.ranks > 1 else 0
    return RandomStream(own, models, device, shared=options.model_parallel_size > 1)
