"""No rank holds much more than its share of parameters, and so of gradients and states."""

import random
from collections.abc import Iterator, Mapping
from math import prod

import pytest
import torch
from torch import nn

from autopar.capture.batch_slices import capture_of_rank
from autopar.core.ir.graph import ParameterInfo
from autopar.core.ir.placement import Shard, shard_dim
from autopar.core.plan.partition import Partition
from autopar.core.plan.strategy import Strategy
from autopar.passes.rules.local_args import local_shape
from autopar.planner.evaluate.candidate import default_config
from autopar.planner.evaluate.zero_shards import shard_replicated
from autopar.planner.search.build_evaluator import build_evaluator
from tests.planner.problems import problem_of

EXPERTS = 8


class Product(nn.Linear):
    """A product of 104 columns, and its loss."""

    def __init__(self) -> None:
        super().__init__(64, 104, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


def parameters(rng: random.Random, mixture: bool) -> Iterator[ParameterInfo]:
    """A transformer of sizes that divide badly, or one with experts of such sizes."""
    width, words = rng.choice((200, 250, 770, 1000)), rng.choice((5003, 50257))
    inner = rng.choice((4 * width, 8 * width // 3, 3 * width + 7))
    experts = (EXPERTS,) if mixture else ()
    shapes = [(words, width), (words, width), (width,)]
    for _ in range(rng.choice((2, 12))):
        shapes += [(width, width)] * 4 + [(width // 5, width)] + [(width,)] * 2
        shapes += [(*experts, inner, width), (*experts, width, inner)]
        shapes += [(EXPERTS, width)] if mixture else [(inner,), (width,)]
    for index, shape in enumerate(shapes):
        yield ParameterInfo(str(index), shape, torch.float32, True, "")


def largest_share(infos: list[ParameterInfo], axes: Mapping[str, int], ranks: int) -> float:
    """Bytes of the rank with the largest chunks, under ZeRO over all axes, over an even share."""
    apart = tuple((p.name, Shard(0)) for p in infos if len(p.shape) == 3)
    fixed = [Partition(a, n, apart if a == "ep" else ()) for a, n in axes.items()]
    partitions, held = shard_replicated(fixed, infos), 0
    for info in infos:
        shape = list(info.shape)
        for partition in partitions:
            if info.name in partition.stored:
                shape = local_shape(shape, partition.stored[info.name], partition.ranks)
        held += prod(local_shape(shape, Shard(shard_dim(shape, ranks)), ranks))
    even = sum(prod(info.shape) for info in infos) / prod((ranks, *axes.values()))
    return held / even


@pytest.mark.parametrize("axes", [{}, {"cp": 2}, {"cp": 4}, {"ep": 2}, {"ep": EXPERTS}], ids=str)
def test_shares_are_even(axes: dict[str, int]) -> None:
    rng = random.Random(0)
    for index in range(6):
        infos = list(parameters(rng, mixture="ep" in axes or index % 2 == 0))
        for ranks in (3, 5, 8, 16):
            assert largest_share(infos, axes, max(1, ranks // prod(axes.values()))) <= 1.05


@pytest.mark.parametrize(("stage", "dim"), [(1, 0), (2, 0), (3, 1)])
def test_kept_parameters_are_sharded_on_a_dim_that_needs_no_copy(stage: int, dim: int) -> None:
    """Seven rows each of 104 over 16 ranks are 8 % too many, and columns divide evenly."""
    model, x = Product(), torch.randn(16, 64)
    own = problem_of(model, Strategy(zero=stage), world_size=16)
    graph = capture_of_rank(model, (x,), 0, 16)
    evaluator = build_evaluator(own, graph, None)
    plan = evaluator.setup.draft(default_config(own.strategy, own.blocks, stage))
    assert dict(plan.placements)["weight"] == Shard(dim)
