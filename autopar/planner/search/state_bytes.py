"""`least_state_bytes`: lower bound of what parameters take, on the rank with the largest shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autopar.core.ir.graph import ParameterInfo
from autopar.core.ir.placement import chunk_of, shard_dim
from autopar.planner.evaluate.candidate import default_config
from autopar.planner.problem import PlanningProblem


def least_state_bytes(
    parameters: Iterable[ParameterInfo],
    zero_stages: Mapping[str, int],
    ranks: int,
    state_ratio: float,
    *,
    accumulates: bool = False,
    stored: bool = False,
) -> float:
    """Bytes of parameters, gradients and optimizer states under ZeRO over some ranks.

    Axes of the model divide these evenly at best. There are `state_ratio` bytes of optimizer state
    per byte of a parameter, and each block has a ZeRO stage. Where micro-batches accumulate, stage
    1 keeps gradients whole. `stored` says that parameters may lie on storage.
    """
    least = 0.0
    for info in parameters:
        stage, share = zero_stages[info.block], largest_share(info, ranks)
        copies = 0.0 if stored else share if stage == 3 else 1.0
        if info.requires_grad:
            copies += state_ratio * (share if stage else 1.0)
            copies += share if stage > accumulates else 1.0
        least += info.bytes * copies
    return least


def least_divided_bytes(problem: PlanningProblem, ranks: int) -> tuple[float, float]:
    """Bytes of states, and of the largest gathered parameter, under ZeRO over some ranks."""
    infos, ratio = problem.parameters.values(), problem.state_ratio
    stages = dict(default_config(problem.strategy, problem.blocks, 3).zero_stages)
    gathered = least_gathered_bytes(infos, ranks, ratio) if any(stages.values()) else 0.0
    stored = problem.strategy.stores_parameters
    return least_state_bytes(infos, stages, ranks, ratio, stored=stored), gathered


def ddp_state_bytes(parameters: Iterable[ParameterInfo], state_ratio: float) -> float:
    """Bytes of parameters, gradients and optimizer states where each rank has all of them."""
    infos = list(parameters)
    stages = dict.fromkeys((info.block for info in infos), 0)
    return least_state_bytes(infos, stages, 1, state_ratio)


def largest_share(info: ParameterInfo, ranks: int) -> float:
    """Fraction of a parameter on the first of some ranks.

    >>> import torch
    >>> [largest_share(ParameterInfo("w", (8, 4), torch.float32, True, ""), n) for n in (4, 16)]
    [0.25, 0.125]
    """
    if not info.shape:
        return 1.0
    size = info.shape[shard_dim(info.shape, ranks)]
    return chunk_of(size, ranks, 0)[1] / size if size else 0.0


def least_gathered_bytes(
    parameters: Iterable[ParameterInfo], ranks: int, state_ratio: float
) -> float:
    """Bytes that the parameter of the most bytes takes beside its shard, while it is used.

    It is put together from shards of equal size, or stays whole with its gradient and states.
    """
    return max(
        (min(_gathered(p, ranks), _kept(p, ranks, state_ratio)) for p in parameters), default=0.0
    )


def padding(parameters: Iterable[ParameterInfo], ranks: int) -> float:
    """Ratio of the bytes of all shards, padded to equal sizes, to those of the parameters."""
    infos = list(parameters)
    total = sum(info.bytes for info in infos)
    return sum(_gathered(info, ranks) for info in infos) / total if total else 1.0


def _gathered(info: ParameterInfo, ranks: int) -> float:
    return info.bytes * largest_share(info, ranks) * ranks if info.shape else float(info.bytes)


def _kept(info: ParameterInfo, ranks: int, state_ratio: float) -> float:
    copies = 2.0 + state_ratio if info.requires_grad else 1.0
    return info.bytes * copies * (1.0 - largest_share(info, ranks))
