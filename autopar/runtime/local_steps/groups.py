"""`Groups`: the running ranks, divided into groups that step apart."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import distributed as dist

from autopar.core.common.world import as_world
from autopar.core.plan.outer import LocalSteps
from autopar.core.plan.strategy import Strategy
from autopar.errors import StrategyError
from autopar.runtime.agreement.consensus import assert_same_across_ranks, gather_objects
from autopar.runtime.group_cache import group_of


@dataclass(frozen=True)
class Groups:
    """Neighbouring ranks as groups of equal size, of which this rank is in one.

    Attributes:
        size: number of ranks of a group.
        count: number of groups.
        index: this rank's group.
        own: process group of its ranks.
        peers: process group of the ranks with this rank's place in every group, by group.
    """

    size: int
    count: int
    index: int
    own: dist.ProcessGroup
    peers: dist.ProcessGroup

    @staticmethod
    def of(local: LocalSteps, size: int, ranks: int, device: torch.device) -> Groups:
        """Groups of `size` ranks for these local steps; all running ranks call this at once.

        Raises:
            StrategyError: the ranks do not divide into several groups of equal size.
            DisagreementError: ranks have other strategies.
        """
        if ranks > 1:
            told = {"local steps": (local, size)}
            assert_same_across_ranks(told, "Give every rank the same strategy.")
        if size >= ranks or ranks % size:
            raise StrategyError(
                f"sync_every={local.sync_every}: {ranks} rank(s) do not divide into several groups "
                f"of {size} that step apart. Give dp_shard=..., the data-parallel ranks of a "
                "group, instead of all ranks of a node, or leave sync_every out."
            )
        parts = [tuple(range(first, first + size)) for first in range(0, ranks, size)]
        peers = [tuple(range(place, ranks, size)) for place in range(size)]
        index, _ = divmod(dist.get_rank(), size)
        groups = (group_of(device, tuple(each)) for each in (parts, peers))
        made = Groups(size, len(parts), index, *groups)
        drawn = local.outer.participants
        if drawn and drawn > made.count:
            raise StrategyError(f"participants={drawn}: there are {made.count} groups")
        return made

    def as_world(self) -> contextlib.AbstractContextManager[None]:
        """Makes this rank's group the world inside the context."""
        return as_world(self.own)


def group_size(strategy: Strategy, ranks: int) -> int:
    """Number of ranks of a group: those under `dp_shard`, or of a node.

    Raises:
        StrategyError: nodes have different numbers of ranks.
    """
    if strategy.dp_shard is not None:
        return strategy.model_parallel_size * strategy.pp_size * strategy.dp_shard
    hosts = gather_objects(socket.gethostname()) if ranks > 1 else [""]
    sizes = {len(list(own)) for _, own in groupby(hosts)}
    if len(sizes) > 1:
        raise StrategyError(
            f"sync_every: a group is a node, and nodes have {sorted(sizes)} ranks: give "
            "dp_shard=..., the data-parallel ranks of a group"
        )
    return sizes.pop()
