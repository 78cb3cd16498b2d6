"""`start_average`: weighted averages of tensors over groups, or over neighbours on a ring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from autopar.core.plan.outer import Outer
from autopar.passes.compression.codecs import Int8
from autopar.runtime.process_groups import explaining_comm_errors
from autopar.runtime.watch.collective_log import LOG

NARROW = {"bf16": torch.bfloat16}
INT8_BLOCK = 256
ROUND = "the average of groups"


@dataclass(frozen=True)
class InFlight:
    """An average that is being computed.

    Attributes:
        tensors: the tensors that are averaged.
        parts: flat messages by dtype, whose sum times `scale` is the average.
        works: transfers in progress.
    """

    tensors: Sequence[Tensor]
    parts: dict[torch.dtype, list[Tensor]] = field(default_factory=dict)
    works: list[Any] = field(default_factory=list)
    scale: float = 1.0

    def wait(self) -> list[Tensor]:
        """The averages, as new tensors."""
        with explaining_comm_errors(ROUND), LOG.waiting(ROUND):
            for work in self.works:
                work.wait()
        found: dict[int, Tensor] = {}
        for dtype, parts in self.parts.items():
            own = [(i, t) for i, t in enumerate(self.tensors) if t.dtype == dtype]
            total = torch.stack(parts).sum(0).to(dtype) * self.scale
            sizes = [tensor.numel() for _, tensor in own]
            for (index, like), flat in zip(own, total.split(sizes), strict=True):
                found[index] = flat.view_as(like)
        return [found[index] for index in range(len(self.tensors))]


def start_average(
    tensors: Sequence[Tensor], outer: Outer, shares: Sequence[float], peers: dist.ProcessGroup
) -> InFlight:
    """Starts to average tensors over groups with these shares; all groups call this at once."""
    rank, size = dist.get_rank(peers), dist.get_world_size(peers)
    neighbours = {(rank - 1) % size, (rank + 1) % size}
    scale = 1 / (1 + len(neighbours)) if outer.over == "ring" else 1.0
    flight = InFlight(tensors, scale=scale)
    with explaining_comm_errors(ROUND), LOG.waiting(ROUND):
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            flat = torch.cat([t.detach().flatten() for t in tensors if t.dtype == dtype])
            if outer.over == "ring":
                received = {peer: torch.empty_like(flat) for peer in neighbours}
                flight.works.extend(_exchange(flat, received, peers))
                flight.parts[dtype] = [flat, *received.values()]
            elif outer.compress == "int8":
                flight.parts[dtype] = [_int8_average(flat, shares, peers)]
            else:
                message = (flat * shares[rank]).to(NARROW.get(outer.compress or "", dtype))
                flight.works.append(dist.all_reduce(message, group=peers, async_op=True))
                flight.parts[dtype] = [message]
    return flight


def _exchange(flat: Tensor, received: dict[int, Tensor], peers: dist.ProcessGroup) -> list[Any]:
    """Sends a message to neighbours and receives theirs."""
    sends = [dist.P2POp(dist.isend, flat, group=peers, group_peer=peer) for peer in received]
    receives = [
        dist.P2POp(dist.irecv, into, group=peers, group_peer=peer)
        for peer, into in received.items()
    ]
    return dist.batch_isend_irecv([*sends, *receives])


def _int8_average(flat: Tensor, shares: Sequence[float], peers: dist.ProcessGroup) -> Tensor:
    """The average in int8: each group averages its part of the rows, then all gather the parts."""
    size, codec = len(shares), Int8(INT8_BLOCK)
    width = codec.fit(-(-flat.numel() // size))
    # an all-reduce cannot add these messages: each int8 block has a scale of its own
    table = torch.nn.functional.pad(flat, (0, size * width - flat.numel())).view(size, width)
    sent = codec.encode(table)
    arrived = torch.empty_like(sent)
    dist.all_to_all_single(arrived, sent, group=peers)
    weights = torch.tensor(shares, dtype=flat.dtype, device=flat.device)
    own = codec.encode((weights @ codec.decode(arrived, width, flat.dtype)).unsqueeze(0))
    parts = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(parts, own, group=peers)
    return codec.decode(torch.cat(parts), width, flat.dtype).flatten()[: flat.numel()]
