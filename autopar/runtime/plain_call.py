"""`run_plain`: a call of the plain model that changes nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autopar._torch import TorchDispatchMode, pytree
from autopar.capture.state.contents import Snapshot
from autopar.capture.values.pure_calls import tensors_in
from autopar.runtime.parameters.distribute import local_part


def has_values(model: nn.Module) -> bool:
    """Whether this rank holds whole values of all parameters."""
    return all(local_part(p).shape == p.shape and not p.is_meta for p in model.parameters())


def run_plain(
    model: nn.Module,
    leaves: Sequence[Any],
    structure: Any,
    loss_fn: Callable[..., Any] | None,
    autocast: contextlib.AbstractContextManager[Any],
) -> Any:
    """The result of a flattened call.

    Parameters, buffers, inputs, random generators and Python values stay as they are, and so do
    other tensors that forward changes in place. The model needs whole values.
    """
    copies = [_alias(x.clone()) if isinstance(x, Tensor) else x for x in leaves]
    args, kwargs = pytree.tree_unflatten(copies, structure)
    args, target = (args[:-1], args[-1:]) if loss_fn is not None else (args, ())
    values = {name: _alias(x) for name, x in (*model.named_parameters(), *model.named_buffers())}
    snapshot, written = Snapshot(model), _WrittenTensors()
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())), autocast, written:
            result = torch.func.functional_call(model, values, tuple(args), kwargs)
            return result if loss_fn is None else loss_fn(result, *target)
    finally:
        written.restore()
        snapshot.restore()


class _WrittenTensors(TorchDispatchMode):
    """Copies tensors from before a call as operators are about to write them."""

    def __init__(self) -> None:
        super().__init__()
        self._made: set[int] = set()  # memory of results; that of older tensors is never given out
        self._copies: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tensors_in((args, kwargs))
        if func._schema.is_mutable:
            older = [x for x in given if _memory(x) not in self._made]
            self._copies += [(x, x.detach().clone()) for x in older]
        result = func(*args, **kwargs)
        self._made |= {_memory(x) for x in tensors_in(result)} - {_memory(x) for x in given}
        return result

    def restore(self) -> None:
        with torch.no_grad():
            # a tensor written twice has two copies, of which the earlier must be restored last
            for tensor, value in reversed(self._copies):
                tensor.copy_(value)


def _memory(tensor: Tensor) -> int:
    """The address of a tensor's memory; 0 for layouts without a storage."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def _alias(tensor: Tensor) -> Tensor:
    return local_part(tensor).detach().requires_grad_(tensor.requires_grad)
