"""`Call`: the arguments of a call, tensors as specs; `BatchShard`: a rank's rows of them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from autopar._torch import pytree
from autopar.capture.stated_rows import StatedRows
from autopar.core.common.containers import check_no_hidden_tensors, flatten
from autopar.core.ir.batch_slicing import BatchSlices
from autopar.core.ir.graph import dense_strides
from autopar.core.ir.placement import even_rows, rows_of_parts
from autopar.errors import BatchError

MOST_STATIC = 4096
"""Elements of a static argument; each of its values has a program."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape, dtype, device and differentiability of a tensor.

    Attributes:
        values: nested lists as text for a static argument, whose values forward reads in Python;
            None for any other tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool = False
    stride: tuple[int, ...] | None = None
    values: str | None = None

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorSpec:
        """The spec of a tensor, with the global shape for a DTensor."""
        return TensorSpec(
            tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad, tensor.stride()
        )

    def with_rows(self, rows: int, dim: int) -> TensorSpec:
        """The spec with another size of a dim, and the same order of dims in memory."""
        shape = (*self.shape[:dim], rows, *self.shape[dim + 1 :])
        stride = None if self.stride is None else dense_strides(shape, self.stride)
        return replace(self, shape=shape, stride=stride)

    def value(self) -> torch.Tensor:
        """The tensor of a static argument."""
        numbers = json.loads(self.values or "[]")
        return torch.tensor(numbers, dtype=self.dtype, device=self.device).view(self.shape)

    def fake(self) -> torch.Tensor:
        """A new tensor of this spec; inside a fake mode it holds no memory."""
        stride = self.stride or torch.empty(self.shape, device="meta").stride()
        made = torch.empty_strided(self.shape, stride, dtype=self.dtype, device=self.device)
        return made.requires_grad_(self.requires_grad)


@dataclass(frozen=True)
class Derivative:
    """A differentiation of the results of a call, whose gradients are results in turn.

    The backward of a captured call is computed by a graph that has no derivative. Where a loop asks
    for one, the call is captured once more: its forward, and `torch.autograd.grad` of it. So
    whatever changes gradients in forward holds for their derivatives, too: `detach`, `no_grad`,
    hooks, functions with a backward of their own.

    Attributes:
        outputs: indices of the flattened results that have a gradient.
        inputs: names of the parameters and indices of the arguments to differentiate by.
    """

    outputs: tuple[int, ...]
    inputs: tuple[str | int, ...]

    def of(
        self,
        result: Any,
        tensors: Mapping[str | int, torch.Tensor],
        tangents: Sequence[torch.Tensor],
    ) -> Any:
        """The gradient of each input, None where nothing flows; the results if gradients are off.

        Args:
            result: results of the call, or its gradients of the derivative before.
            tensors: parameters by name and arguments by index.
            tangents: gradients of the outputs.
        """
        if not torch.is_grad_enabled():
            return result
        leaves, _ = flatten(result)
        outputs = [leaves[index] for index in self.outputs]
        with _without_autocast(outputs[0].device.type):
            gradients = torch.autograd.grad(
                outputs,
                [tensors[key] for key in self.inputs],
                list(tangents),
                create_graph=True,
                allow_unused=True,
            )
        return list(gradients)


def _without_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    """The backward of eager code runs after the autocast of its forward."""
    if not torch.is_autocast_enabled(device):
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)


class Answer(NamedTuple):
    """A number that Python reads from arguments, and the line of the user that reads it."""

    place: tuple[str, int] | None
    value: bool | int | float


@dataclass(frozen=True)
class Call:
    """Flattened (args, kwargs) of a call, tensors as `TensorSpec`, and their tree structure.

    Attributes:
        row_dims: the dim of each leaf that is the batch's, None for a leaf without rows.
        derivatives: what the results are differentiated by, one time after another. With any,
            the structure is that of ((args, kwargs), tangents of the first, ...).
        answers: values that forward reads in Python from arguments of the whole batch, in order.
    """

    leaves: tuple[Any, ...]
    structure: Any
    row_dims: tuple[int | None, ...]
    derivatives: tuple[Derivative, ...] = ()
    answers: tuple[Answer, ...] = ()

    @property
    def tensor_indices(self) -> tuple[int, ...]:
        return tuple(i for i, leaf in enumerate(self.leaves) if isinstance(leaf, TensorSpec))

    @property
    def key(self) -> tuple[Any, ...]:
        """A hashable key of the call; unhashable arguments are keyed by their repr."""
        leaves = tuple(x if _hashable(x) else repr(x) for x in self.leaves)
        return leaves, self.structure, self.row_dims, self.derivatives, self.answers

    def with_batch_size(self, rows: int) -> Call:
        leaves = tuple(
            leaf if dim is None else leaf.with_rows(rows, dim)
            for leaf, dim in zip(self.leaves, self.row_dims, strict=True)
        )
        return replace(self, leaves=leaves)


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


@dataclass(frozen=True)
class BatchShard:
    """Rows of the arguments of a call, of one rank or micro-batch.

    Attributes:
        call: arguments of the shard, tensors as specs.
        tensors: tensor arguments of the shard.
        slices: slices of the global batch, with the index of this one.
    """

    call: Call
    tensors: tuple[torch.Tensor, ...]
    rows: int
    slices: BatchSlices

    @property
    def has_rows(self) -> bool:
        """Whether an argument has rows that the ranks share."""
        return any(dim is not None for dim in self.call.row_dims)

    def split_micro_batches(self, count: int, even: bool = False) -> list[BatchShard]:
        """Splits the shard into micro-batches, of which the first may have a row more.

        Raises:
            BatchError: a rank has fewer rows, or with `even` one would have a row more.
        """
        if count == 1:
            return [self]
        parts, begin = [], 0
        for slices in self.slices.over_micro_batches(count, even):
            rows = slices.sizes[slices.index]
            leaves, tensors = list(self.call.leaves), list(self.tensors)
            for place, leaf in enumerate(self.call.tensor_indices):
                if (dim := self.call.row_dims[leaf]) is not None:
                    tensors[place] = tensors[place].narrow(dim, begin, rows)
                    leaves[leaf] = TensorSpec.of(tensors[place])
            call = replace(self.call, leaves=tuple(leaves))
            parts.append(BatchShard(call, tuple(tensors), rows, slices))
            begin += rows
        return parts


class UnevenRowsError(BatchError):
    """A batch is uneven over ranks that would each divide their rows further."""


def batch_shard_of(
    leaves: Sequence[Any],
    structure: Any,
    *,
    mode: str,
    rank: int,
    ranks: int,
    static: Sequence[str] = (),
    shares: tuple[float, ...] = (),
    stated: StatedRows | None = None,
    strict: bool = False,
    undivided: Collection[int] = (),
) -> BatchShard:
    """This rank's rows of the flattened arguments of a call.

    `stated` says which dims are rows. Otherwise their number is the size of dim 0 of the first
    tensor with a dim, and dim 0 of every tensor with this size is the batch dim. `static` names
    keyword arguments that every rank has whole, with their values. Rows are divided in proportion
    to `shares`, evenly without any. Every rank gets all rows if there are fewer than ranks, unless
    `strict`, and where their number is `undivided`.

    Raises:
        BatchError: a sparse argument, a static one that is no tensor of numbers, stated rows that
            the arguments do not have, or fewer rows than ranks under `strict`.
    """
    _check_dense(leaves)
    held: tuple[int, ...] = ()
    known = _places(leaves, structure, static) if static else set()
    if stated is None:
        dims = _first_dims(leaves, known)
    else:
        dims = tuple(
            None if index in known else dim
            for index, dim in enumerate(stated.dims_of(leaves, structure))
        )
    sizes = [x.shape[dim] for x, dim in zip(leaves, dims, strict=True) if dim is not None]
    batch_rows = sizes[0] if sizes else 0
    if not sizes:
        rows, global_rows, begin = 1, ranks, 0
    elif mode == "local" or ranks == 1:
        rows, global_rows, begin = batch_rows, batch_rows * ranks, 0
    elif (batch_rows < ranks and not strict) or batch_rows in undivided:
        # too few rows to share: every rank computes all of them, as it does what has no rows
        dims = (None,) * len(leaves)
        rows, global_rows, begin = 1, ranks, 0
    else:
        if batch_rows < ranks:
            raise BatchError(_too_few(batch_rows, ranks))
        rows_of_ranks = rows_of_parts(batch_rows, ranks, shares)
        held = () if rows_of_ranks == even_rows(batch_rows, ranks) else rows_of_ranks
        rows, global_rows, begin = rows_of_ranks[rank], batch_rows, sum(rows_of_ranks[:rank])
    shard = [
        x if dim is None or rows == batch_rows else x.narrow(dim, begin, rows)
        for x, dim in zip(leaves, dims, strict=True)
    ]
    specs = [TensorSpec.of(x) if isinstance(x, torch.Tensor) else x for x in shard]
    for index in known:
        specs[index] = _with_values(shard[index], specs[index])
    tensors = tuple(x for x in shard if isinstance(x, torch.Tensor))
    call, slices = (
        Call(tuple(specs), structure, dims),
        BatchSlices(ranks, rank, global_rows, held=held),
    )
    return BatchShard(call, tensors, rows, slices)


def _check_dense(leaves: Sequence[Any]) -> None:
    """Checks that no argument is sparse.

    Raises:
        BatchError: one is.
    """
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided:
            raise BatchError(
                f"an argument is a sparse tensor ({leaf.layout}), which cannot be captured: give "
                "its values and indices as dense tensors, and make the sparse one in forward."
            )


def _too_few(rows: int, ranks: int) -> str:
    """Says that a plan cannot split so few rows, and what can."""
    size = "one row" if rows == 1 else f"{rows} rows"
    advice = (
        f"give example_inputs with at least {ranks} rows, as most batches have, or run fewer "
        "ranks. Later batches may be smaller."
    )
    if rows == 1:
        advice += (
            f" If sequences are packed into one row, split its tokens by Strategy(cp={ranks}), or "
            "let each rank bring a packed row of its own: batch='local', in AutoparTrainer and "
            "AutoparAccelerator by compile_options={'batch': 'local'}."
        )
    return f"a batch of {size} cannot be split over {ranks} ranks, and a plan needs that: {advice}"


def _first_dims(leaves: Sequence[Any], known: set[int]) -> tuple[int | None, ...]:
    """Dim 0 of every tensor with as many rows as the first one."""
    has_dim = [
        isinstance(x, torch.Tensor) and x.dim() > 0 and index not in known
        for index, x in enumerate(leaves)
    ]
    rows = next((x.shape[0] for x, has in zip(leaves, has_dim, strict=True) if has), 0)
    pairs = zip(leaves, has_dim, strict=True)
    return tuple(0 if has and x.shape[0] == rows else None for x, has in pairs)


def _places(leaves: Sequence[Any], structure: Any, static: Sequence[str]) -> set[int]:
    """Places of the tensors among the flattened arguments that belong to static ones."""
    _, by_name = pytree.tree_unflatten(list(range(len(leaves))), structure)
    given = [by_name[name] for name in static if name in by_name]
    return {i for i in pytree.tree_leaves(given) if isinstance(leaves[i], torch.Tensor)}


def _with_values(tensor: torch.Tensor, spec: TensorSpec) -> TensorSpec:
    if tensor.is_floating_point() or tensor.is_complex() or tensor.numel() > MOST_STATIC:
        raise BatchError(
            f"a static argument is a tensor of {tensor.numel()} {tensor.dtype} values: give "
            f"tensors of at most {MOST_STATIC} integers, such as sizes of images"
        )
    return replace(spec, values=json.dumps(tensor.tolist()))


def last_part(inputs: Any, parts: int) -> Any:
    """The last of `parts` parts of a batch, in the same structure.

    Raises:
        BatchError: fewer rows than parts.
    """
    leaves, structure = flatten(inputs)
    shard = batch_shard_of(
        leaves, structure, mode="global", rank=parts - 1, ranks=parts, strict=True
    )
    tensors = iter(shard.tensors)
    rows = [next(tensors) if isinstance(x, torch.Tensor) else x for x in leaves]
    return pytree.tree_unflatten(rows, structure)


def flattened(example_inputs: Any) -> tuple[list[Any], Any]:
    """The flattened (args, kwargs) of `call_of`, and their structure.

    Raises:
        BatchError: an argument hides tensors.
    """
    leaves, structure = flatten(call_of(example_inputs))
    check_no_hidden_tensors(leaves)
    return leaves, structure


def call_of(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The (args, kwargs) of a tuple, dict by name or single argument."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    return (example_inputs,), {}
