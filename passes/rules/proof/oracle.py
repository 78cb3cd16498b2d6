"""`is_correct`: the oracle, which compares an operator on shards with the whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from autopar.core.ir.placement import OpStrategy, Partial, Placement, Shard, can_cut, chunk_rows
from autopar.errors import PassError
from autopar.passes.rules.local_args import local_arguments
from autopar.passes.rules.loops import Operator
from autopar.passes.rules.lowerings.registry import program
from autopar.passes.rules.proof.spmd_interpreter import run_spmd


def shard_tensor(tensor: torch.Tensor, placement: Placement, ranks: int) -> list[torch.Tensor]:
    """The local tensor of each rank; summands of a partial sum are random.

    Raises:
        PassError: the ranks do not divide the dim.
    """
    if isinstance(placement, Shard):
        size, pieces = tensor.shape[placement.dim], placement.interleave
        if not can_cut(size, ranks, pieces):
            raise PassError(f"{placement} does not divide {list(tensor.shape)} over {ranks} ranks")
        if pieces == 1:
            chunks = tensor.split(chunk_rows(size, ranks), placement.dim)
            return [chunk.clone(memory_format=torch.contiguous_format) for chunk in chunks]
        parts = tensor.unflatten(placement.dim, (pieces, ranks, size // (pieces * ranks)))
        return [
            parts.select(placement.dim + 1, rank)
            .flatten(placement.dim, placement.dim + 1)
            .contiguous()
            for rank in range(ranks)
        ]
    if isinstance(placement, Partial):
        if placement.op == "sum":
            parts = [torch.rand_like(tensor) - 0.5 for _ in range(ranks - 1)]
            return [*parts, tensor - sum(parts)]
        return [tensor if rank == 1 % ranks else tensor - rank - 1 for rank in range(ranks)]
    return [tensor] * ranks


def unshard(parts: Sequence[torch.Tensor], placement: Placement) -> torch.Tensor | None:
    """The whole of the ranks' local tensors; None if they are replicated and differ."""
    if isinstance(placement, Shard) and placement.interleave == 1:
        return torch.cat(list(parts), placement.dim)
    if isinstance(placement, Shard):
        pieces = [p.unflatten(placement.dim, (placement.interleave, -1)) for p in parts]
        return torch.cat(pieces, placement.dim + 1).flatten(placement.dim, placement.dim + 1)
    if isinstance(placement, Partial):
        stacked = torch.stack(list(parts))
        return stacked.sum(0) if placement.op == "sum" else stacked.amax(0)
    same = all(is_close(part, parts[0]) for part in parts)
    return parts[0] if same else None


def is_correct(operator: Operator, op_strategy: OpStrategy, ranks: int) -> bool:
    """Whether an operator on real tensors computes the same by a strategy as on one device."""
    gpus = {t.device.index for t in operator.operands if t.device.type == "cuda"}
    # Lowerings of random operators draw the whole on every rank, so both runs take one seed.
    with torch.random.fork_rng(devices=gpus):
        torch.manual_seed(0)
        local_results = run_on_shards(operator, op_strategy, ranks)
        torch.manual_seed(0)
        expected = run_operator(operator)
    for index, placement in enumerate(op_strategy.results):
        parts = [results[index] for results in local_results]
        if expected[index] is None:
            continue
        if any(part is None for part in parts):
            return False
        try:
            result = unshard(parts, placement)
        except RuntimeError:
            return False
        if result is None or not is_close(result, expected[index]):
            return False
    return True


def run_on_shards(
    operator: Operator, op_strategy: OpStrategy, ranks: int
) -> Sequence[Sequence[Any]]:
    """The results of each rank for an operator on real tensors, by a strategy."""
    whole = operator.operands
    columns = [shard_tensor(t, p, ranks) for t, p in zip(whole, op_strategy.operands, strict=True)]
    shards = [[parts[rank] for parts in columns] for rank in range(ranks)]
    if op_strategy.lowering:
        return run_spmd(
            [program(operator, op_strategy, ranks, rank) for rank in range(ranks)], shards
        )
    return [
        run_operator(local_arguments(operator, op_strategy, local, ranks, rank))
        for rank, local in enumerate(shards)
    ]


def run_operator(operator: Operator) -> tuple[Any, ...]:
    """The results of an operator, as a tuple."""
    value = operator.target(*operator.args, **operator.kwargs)
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def is_close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors are equal up to rounding."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    if not expected.dtype.is_floating_point:
        return torch.equal(actual, expected)
    bound = math.sqrt(torch.finfo(expected.dtype).eps)
    return torch.allclose(actual, expected, rtol=bound, atol=bound, equal_nan=True)
