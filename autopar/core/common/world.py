"""The world of ranks that share one plan: all running ones, or a group of them.

Under local steps (`Strategy(sync_every=...)`) each group of ranks trains as a world of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar

from torch import distributed as dist

_CURRENT: ContextVar[dist.ProcessGroup | None] = ContextVar("world", default=None)


@contextlib.contextmanager
def as_world(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Makes a group, or all running ranks for None, the world of this thread inside."""
    token = _CURRENT.set(group)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def world() -> dist.ProcessGroup:
    """The process group of the world; torch.distributed must be initialized."""
    group = _CURRENT.get() or dist.group.WORLD
    assert group is not None, "torch.distributed is not initialized"
    return group


def is_part() -> bool:
    """Whether the world is a group of the running ranks, not all of them."""
    return _CURRENT.get() is not None


def rank() -> int:
    """This process's rank in the world; 0 without a process group."""
    return dist.get_rank(world()) if _is_initialized() else 0


def world_size() -> int:
    """Number of ranks of the world; 1 without a process group."""
    return dist.get_world_size(world()) if _is_initialized() else 1


def running_ranks(ranks: Iterable[int]) -> list[int]:
    """Ranks of the world as torch.distributed numbers them."""
    numbers = dist.get_process_group_ranks(world())
    return [numbers[each] for each in ranks]


def _is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()
