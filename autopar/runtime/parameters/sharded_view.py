"""`ShardedView`: a view of a sharded tensor, such as a row, which may be written in place."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar._torch import empty_subclass, local_tensor, pytree
from autopar.runtime.parameters.unread import UnreadTensor
from autopar.runtime.parameters.whole_values import read_whole, write_whole


def version_of(tensor: torch.Tensor) -> int:
    """A number that grows as a tensor's values are changed in place.

    Operators on a sharded parameter count at the parameter, writes to this rank's part at the part.
    """
    return tensor._version + local_tensor(tensor)._version


class Root:
    """A sharded tensor and its whole values, of which all views of one operator are views."""

    def __init__(self, base: DTensor, whole: torch.Tensor) -> None:
        self.base, self.whole = base, whole
        self._version = version_of(self.base)

    def refresh(self) -> None:
        """Takes up what was written to the base since."""
        if version_of(self.base) != self._version:
            # In place, since the loop's views are views of this memory.
            self.whole.copy_(read_whole(self.base))
            self._version = version_of(self.base)

    def write_back(self) -> None:
        """Writes this rank's part of the whole values."""
        write_whole(self.base, self.whole)
        self._version = version_of(self.base)


class ShardedView(UnreadTensor):
    """A view of whole values on every rank; what is written to it goes to the sharded tensor."""

    _root: Root
    _value: torch.Tensor

    @staticmethod
    def __new__(cls, root: Root, value: torch.Tensor) -> ShardedView:
        made: ShardedView = empty_subclass(cls, tuple(value.shape), value.stride(), value)
        made._root, made._value = root, value
        return made

    def read(self) -> torch.Tensor:
        """The values now."""
        self._root.refresh()
        return self._value

    def viewed(self, views: Any) -> Any:
        """Views of the view, which write to the same tensor."""
        return views_of(self._root, views)

    def written(self) -> None:
        """Writes the values back."""
        self._root.write_back()


def views_of(root: Root, views: Any) -> Any:
    """The results of an operator as views of a sharded tensor."""
    return pytree.tree_map_only(torch.Tensor, lambda view: ShardedView(root, view), views)
