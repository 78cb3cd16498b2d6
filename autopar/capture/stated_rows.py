"""`StatedRows`: the dims of arguments that are rows of the batch, as a user states them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar._torch import pytree
from autopar.errors import BatchError


@dataclass(frozen=True)
class StatedRows:
    """Dims that are rows: the same of every tensor, or by argument.

    Attributes:
        every: the dim of every tensor that has it; None with `by_argument`.
        by_argument: dims by name or position; other arguments have no rows.
        names: names of the positional arguments of forward.
    """

    every: int | None
    by_argument: tuple[tuple[str | int, int], ...] = ()
    names: tuple[str, ...] = ()

    @staticmethod
    def of(rows: Any, model: nn.Module) -> StatedRows | None:
        """The statement that `rows` of autopar.compile makes of the arguments of a model."""
        if rows is None or isinstance(rows, StatedRows):
            return rows
        if isinstance(rows, int):
            return StatedRows(rows)
        parameters = inspect.signature(model.forward).parameters.values()
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = tuple(p.name for p in parameters if p.kind in positional)
        return StatedRows(None, tuple(rows.items()), names)

    def dims_of(self, leaves: Sequence[Any], structure: Any) -> tuple[int | None, ...]:
        """The dim of each flattened argument that is rows, None for those without.

        Raises:
            BatchError: a tensor has no such dim, or tensors have different numbers of rows.
        """
        dims: list[int | None] = [None] * len(leaves)
        args, kwargs = pytree.tree_unflatten(list(range(len(leaves))), structure)
        given = [*enumerate(args), *kwargs.items()]
        for key, tree in given:
            dim = self._dim_of(key)
            for index in pytree.tree_leaves(tree):
                leaf = leaves[index]
                if dim is None or not isinstance(leaf, torch.Tensor):
                    continue
                if leaf.dim() > dim:
                    dims[index] = dim
                elif self.every is None:
                    raise BatchError(
                        f"rows= says that dim {dim} of argument {key!r} is rows, but its shape is "
                        f"{tuple(leaf.shape)}"
                    )
        sizes = {leaves[i].shape[dim] for i, dim in enumerate(dims) if dim is not None}
        if len(sizes) > 1:
            shapes = ", ".join(
                f"{tuple(leaves[i].shape)} (dim {dim})"
                for i, dim in enumerate(dims)
                if dim is not None
            )
            raise BatchError(
                f"rows= says that these tensors have the rows of one batch, but their numbers "
                f"differ: {shapes}. Name the arguments that have rows, as rows={{'x': 0}}."
            )
        return tuple(dims)

    def _dim_of(self, key: str | int) -> int | None:
        if self.every is not None:
            return self.every
        dims = dict(self.by_argument)
        if isinstance(key, int) and key not in dims and key < len(self.names):
            return dims.get(self.names[key])
        return dims.get(key)
