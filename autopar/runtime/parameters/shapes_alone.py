"""`ShapesAlone`: runs operators on values that another rank has, by their shapes.

The rank that has them runs the same loop. What it makes of them needs no value here, as long as
nothing of this rank depends on it. Random draws are made here too, so that the streams of all
ranks stay alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autopar._torch import OpOverload, TorchDispatchMode, pytree

META = torch.device("meta")


class ValueNeededError(RuntimeError):
    """A value of another rank would be written into a tensor of this one, or tell what to draw."""


class ShapesAlone(TorchDispatchMode):
    """Runs operators that have an argument on the meta device there.

    Attributes:
        device: where the rank that has the values keeps them.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = _tensors_of((args, kwargs))
        is_mixed = len({tensor.is_meta for tensor in tensors}) > 1
        # Run together, it would write stand-ins for other ranks' values into this rank's tensors.
        if is_mixed and func.overloadpacket.__name__.startswith("_foreach_"):
            return self._run_apart(func, args, kwargs)
        return self._run(func, args, kwargs)

    def _run(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        kwargs, tensors = dict(kwargs), _tensors_of((args, kwargs))
        if not any(tensor.is_meta for tensor in tensors):
            if tensors and kwargs.get("device") == META:  # as `x.to(parameter)` takes it
                kwargs["device"] = self.device
            return func(*args, **kwargs)
        if not all(tensor.is_meta for tensor in _written(func, args, kwargs)):
            raise ValueNeededError
        if torch.Tag.nondeterministic_seeded in func.tags:
            return self._draw(func, args, kwargs)
        args, kwargs = pytree.tree_map_only(torch.Tensor, _on_meta, (args, kwargs))
        if "device" in kwargs:
            kwargs["device"] = META
        return func(*args, **kwargs)

    def _draw(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """Draws as many numbers as the other rank does, which shapes alone must tell.

        Poisson's numbers, for one, take more or fewer draws by their means.
        """
        written = _written(func, args, kwargs)
        is_like = func.overloadpacket.__name__.endswith("_like")
        read = _tensors_of((args, kwargs))
        if not is_like and any(all(x is not w for w in written) for x in read):
            raise ValueNeededError

        def stand_in(tensor: torch.Tensor) -> torch.Tensor:
            shape, strides = tensor.shape, tensor.stride()
            zeros = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=self.device)
            return zeros.zero_()

        scratch, named = pytree.tree_map_only(torch.Tensor, stand_in, (args, kwargs))
        if "device" in named:
            named["device"] = self.device
        drawn = func(*scratch, **named)
        return args[0] if written else drawn

    def _run_apart(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """Runs an operator on lists once for tensors of this rank, and once for the others."""
        lists = [a for a in (*args, *kwargs.values()) if _has_tensors(a)]
        rows = list(zip(*lists, strict=True))
        remote = [any(tensor.is_meta for tensor in row) for row in rows]
        results: list[Any] = [None] * len(rows)
        has_results = False
        for flag in (False, True):
            places = [i for i, other in enumerate(remote) if other is flag]

            def chosen(value: Any, places: Sequence[int] = places) -> Any:
                per_row = isinstance(value, (list, tuple)) and len(value) == len(rows)
                return [value[i] for i in places] if per_row else value

            named = {key: chosen(value) for key, value in kwargs.items()}
            part = self._run(func, tuple(map(chosen, args)), named) if places else ()
            for place, result in zip(places, part or (), strict=False):
                results[place], has_results = result, True
        return results if has_results else None


def _tensors_of(values: Any) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(values) if isinstance(x, torch.Tensor)]


def _has_tensors(value: Any) -> bool:
    is_list = isinstance(value, (list, tuple)) and bool(value)
    return is_list and all(isinstance(each, torch.Tensor) for each in value)


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)


def _written(func: OpOverload, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that an operator changes, by its schema.

    Schemas of batch norms are silent on the running statistics that they change.
    """
    values = [
        args[place] if place < len(args) else kwargs.get(argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.name.startswith("running_")
        or (argument.alias_info is not None and argument.alias_info.is_write)
    ]
    return _tensors_of(values)
