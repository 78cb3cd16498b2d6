"""Norms of sharded tensors, which one collective reads together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar._torch import empty_subclass, local_tensor
from autopar.runtime.agreement.channel import channel, finish_exchange
from autopar.runtime.parameters.dtensor_layout import is_sharded
from autopar.runtime.parameters.strided_shard import whole_tensor
from autopar.runtime.parameters.unread import UnreadTensor
from autopar.runtime.process_groups import explaining_comm_errors


@dataclass(eq=False)
class _Norm:
    """The norm of a tensor of which each rank has a part.

    Attributes:
        axes: axes of the mesh over which the tensor is sharded.
        value: norm of this rank's part, and of the whole tensor once it is read.
    """

    value: torch.Tensor
    order: float
    mesh: DeviceMesh
    axes: tuple[int, ...]
    is_read: bool = False

    @staticmethod
    def of(tensor: DTensor, order: float) -> _Norm:
        part = local_tensor(tensor)
        # torch refuses the infinity norm of an empty tensor, and a rank's shard may be empty.
        norm = torch.linalg.vector_norm(part, order) if part.numel() else part.new_zeros(())
        axes = tuple(i for i, placement in enumerate(tensor.placements) if is_sharded(placement))
        return _Norm(norm, order, tensor.device_mesh, axes)

    @property
    def key(self) -> tuple[Any, ...]:
        """Norms with the same key are read by the same collectives."""
        return self.mesh, self.axes, self.order, self.value.dtype, self.value.device


def _read_all(norms: Iterable[_Norm]) -> None:
    """Reads the norms of whole tensors; all ranks of their meshes call this at once."""
    by_key: dict[Any, list[_Norm]] = {}
    for norm in norms:
        by_key.setdefault(norm.key, []).append(norm)
    finish_exchange()
    for group in by_key.values():
        first, values = group[0], torch.stack([norm.value for norm in group])
        for axis in first.axes:
            gathered = values.new_empty(first.mesh.size(axis), len(group))
            with explaining_comm_errors("the norms of sharded tensors"):
                dist.all_gather(list(gathered.unbind()), values, group=first.mesh.get_group(axis))
            values = torch.linalg.vector_norm(gathered, first.order, dim=0)
        for norm, value in zip(group, values.unbind(), strict=True):
            norm.value, norm.is_read = value.clone(), True


@dataclass
class _Unread:
    """The norms that no operator has read yet, in the order of all ranks."""

    norms: list[_Norm] = field(default_factory=list)

    def read_all(self) -> None:
        norms, self.norms = self.norms, []
        if (agreement := channel()) is not None:
            agreement.exchange(f"reads {len(norms)} norm(s) of parameters or gradients")
        _read_all(norms)


_UNREAD = _Unread()
"""Norms of all models, since an operator may read those of several."""

MAX_UNREAD = 10_000
"""Norms beyond which they are read though no operator needs them."""


class LazyNorm(UnreadTensor):
    """The norm of all elements of a sharded tensor; reading one reads those taken before, too."""

    _norm: _Norm

    @staticmethod
    def __new__(cls, tensor: DTensor, order: float) -> LazyNorm:
        norm = _Norm.of(tensor, order)
        made: LazyNorm = empty_subclass(cls, (), (), norm.value)
        made._norm = norm
        _UNREAD.norms.append(norm)
        if len(_UNREAD.norms) > MAX_UNREAD:
            _UNREAD.read_all()
        return made

    def read(self) -> torch.Tensor:
        """The norm of the whole tensor."""
        if not self._norm.is_read:
            _UNREAD.read_all()
        return self._norm.value


def total_norm(
    tensors: Sequence[torch.Tensor], order: float, foreach: bool | None = None
) -> torch.Tensor:
    """`torch.nn.utils.get_total_norm` of tensors that the ranks have agreed to read."""
    # A norm of order 0 counts elements: the norm of the parts' norms would count parts.
    if order <= 0 or not any(isinstance(tensor, DTensor) for tensor in tensors):
        return nn.utils.get_total_norm([*map(whole_tensor, tensors)], order, foreach=foreach)
    norms = [_Norm.of(x, order) if isinstance(x, DTensor) else x.norm(order) for x in tensors]
    _read_all(norm for norm in norms if isinstance(norm, _Norm))
    values = [norm.value if isinstance(norm, _Norm) else norm for norm in norms]
    return torch.linalg.vector_norm(torch.stack([x.to(values[0].device) for x in values]), order)
