"""`LiveBytes`: bytes of the tensors that live inside a context."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.runtime.parameters.distribute import is_remote


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live storages, without meta tensors; fake tensors count in full.

    Attributes:
        now: bytes at present.
        peak: the most bytes at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[Any, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            has_memory = isinstance(tensor, Tensor) and not isinstance(tensor, DTensor)
            if has_memory and not is_remote(tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: Any) -> None:
        reference = weakref.ref(storage, self._forget)
        if reference not in self._live:
            self._live[reference] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)

    def _forget(self, reference: Any) -> None:
        self.now -= self._live.pop(reference, 0)
