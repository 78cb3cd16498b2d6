"""`HostCopy`: a copy of a state in host memory, into the same buffers every time."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from autopar._torch import local_tensor
from autopar.runtime.parameters.sharded import in_layout_of

Path = tuple[Any, ...]
"""Keys that lead to a value of a nested state."""

UNCHANGING = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


class HostCopy:
    """Buffers for the local parts of a state's tensors.

    The first copy allocates them, in pinned memory beside a GPU. Memory that is new to a process
    takes several times as long to write as memory that it has used before.
    """

    def __init__(self) -> None:
        self._buffers: dict[Path, Tensor] = {}

    @torch.no_grad()
    def take(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state of this moment; the copy holds until the next one is taken."""
        pending: dict[Path, tuple[Tensor, Tensor]] = {}
        copied = self._copied(state, (), pending)
        for source, buffer in pending.values():
            buffer.copy_(source, non_blocking=True)
        if any(not source.is_cpu for source, _ in pending.values()):
            torch.accelerator.synchronize()
        self._buffers = {path: target for path, (_, target) in pending.items()}
        assert isinstance(copied, dict)
        return copied

    def _copied(self, value: Any, path: Path, pending: dict[Path, tuple[Tensor, Tensor]]) -> Any:
        """The value with buffers in the place of tensors; `pending` gets what fills them."""
        if isinstance(value, Tensor):
            return self._copied_tensor(value, path, pending)
        if isinstance(value, Mapping):
            return {key: self._copied(each, (*path, key), pending) for key, each in value.items()}
        if type(value) in (list, tuple):
            return type(value)(
                self._copied(each, (*path, index), pending) for index, each in enumerate(value)
            )
        return value if type(value) in UNCHANGING else deepcopy(value)

    def _copied_tensor(
        self, value: Tensor, path: Path, pending: dict[Path, tuple[Tensor, Tensor]]
    ) -> Tensor:
        local = local_tensor(value)
        is_plain = type(local) in (Tensor, torch.nn.Parameter)
        if not is_plain or local.layout is not torch.strided:
            return value.detach().to("cpu", copy=True)
        buffer = self._buffers.get(path)
        if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
            pin = torch.cuda.is_available()
            buffer = torch.empty_like(local, device="cpu", requires_grad=False, pin_memory=pin)
        pending[path] = local, buffer
        return in_layout_of(value, buffer)
