"""`probe_links`: times of transfers between neighbouring ranks."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import distributed as dist

from autopar.core.common.groups import gather_values

PROBE_BYTES = 1 << 18
"""Bytes of a transfer."""

TRANSFERS = 5
"""Transfers over each link; the fastest counts."""


@dataclass(frozen=True)
class Probe:
    """Times of links, the same on all ranks.

    Attributes:
        times: seconds of a transfer, by the ranks that send and receive.
        hosts: name of each rank's machine.
        seconds: duration of the probe in seconds, on the slowest rank.
    """

    times: dict[tuple[int, int], float]
    hosts: list[str]
    seconds: float


def probe_links(group: dist.ProcessGroup) -> Probe:
    """Times the links of all ranks on a ring, in both directions; all ranks call this at once.

    Args:
        group: gloo group of all ranks that carries nothing else meanwhile.
    """
    rank, size, begin = dist.get_rank(group), dist.get_world_size(group), perf_counter()
    mine = {(rank - step) % size: _fastest(step, group) for step in {1, size - 1}}
    told = gather_values((socket.gethostname(), mine, perf_counter() - begin), group)
    times = {(peer, r): s for r, (_, found, _) in enumerate(told) for peer, s in found.items()}
    return Probe(times, [host for host, _, _ in told], max(seconds for *_, seconds in told))


def _fastest(step: int, group: dist.ProcessGroup) -> float:
    """Seconds to receive from the rank `step` before, while all ranks send as far."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    sent, received = torch.zeros(2, PROBE_BYTES, dtype=torch.uint8)
    found = []
    for _ in range(TRANSFERS):
        # Without it, the time would include how late the sender begins.
        dist.barrier(group)
        begin = perf_counter()
        receive = dist.irecv(received, group=group, group_src=(rank - step) % size)
        send = dist.isend(sent, group=group, group_dst=(rank + step) % size)
        assert receive is not None  # this rank is in the group
        assert send is not None
        receive.wait()
        found.append(perf_counter() - begin)
        send.wait()
    return min(found)
