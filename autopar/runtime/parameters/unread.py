"""`UnreadTensor`: a tensor whose values are found when an operator needs them."""

from __future__ import annotations

from typing import Any

import torch

from autopar._torch import pytree


class UnreadTensor(torch.Tensor):
    """Base of tensors without memory of their own; all ranks read one at once."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = (tuple(args), kwargs or {})
        with torch.no_grad():
            plain_args, plain_kwargs = pytree.tree_map_only(UnreadTensor, read, given)
            result = func(*plain_args, **plain_kwargs)
            if not any(argument.is_write for argument in func._schema.arguments):
                own = args[0]
                return own.viewed(result) if func.is_view and isinstance(own, cls) else result
            for tensor in pytree.tree_leaves(given):
                if isinstance(tensor, UnreadTensor):
                    tensor.written()
            return args[0] if isinstance(args[0], UnreadTensor) else result

    def read(self) -> torch.Tensor:
        """The values now, plain."""
        raise NotImplementedError

    def viewed(self, views: Any) -> Any:
        """The results of an operator that views the values."""
        return views

    def written(self) -> None:
        """Takes note that an operator has written the values that `read` returned."""

    def tolist(self) -> Any:
        """The values as lists; all ranks call this at once."""
        return self.read().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """The values as an array; all ranks call this at once."""
        return self.read().numpy(force=force)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.read().__array__(*args, **kwargs)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={list(self.shape)})"


def read(tensor: UnreadTensor) -> torch.Tensor:
    """`UnreadTensor.read` of the tensor's class."""
    return tensor.read()
