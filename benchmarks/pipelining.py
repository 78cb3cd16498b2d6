"""The models of `models` as a user of torch.distributed.pipelining cuts them.

The layers are split evenly; what comes before them goes with the first, what comes after them with
the last. So it is in torch's tutorial on pipelining a transformer.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from torch.nn import functional as F

from benchmarks.models import GPT, ConvNet, Encoder

Train = Callable[[Tensor, Tensor], Tensor]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]

ONE_STAGE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
ANY_STAGES = {"interleaved": ScheduleInterleaved1F1B, "zero_bubble": ScheduleInterleavedZeroBubble}
STAGES_PER_RANK: dict[Schedule, int] = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 1}


def micro_batches(ranks: int) -> int:
    """Return into how many parts everyone cuts the batch."""
    return 2 * ranks


class Embeddings(nn.Module):
    """What a transformer does before its first layer."""

    def __init__(self, model: GPT | Encoder) -> None:
        super().__init__()
        self.token, self.position = model.token, model.position
        self.norm = model.norm if isinstance(model, Encoder) else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens (rows, SEQ) to (rows, SEQ, WIDTH)."""
        return self.norm(self.token(x) + self.position.weight[: x.shape[1]])


class Pooling(nn.Module):
    """What a conv net does between its last layer and its head."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, channels, height, width) to (rows, channels)."""
        return x.mean((2, 3))


def ends(model: nn.Module) -> tuple[nn.Module, list[nn.Module]]:
    """Return what comes before the layers of a model and what comes after them."""
    if isinstance(model, ConvNet):
        return model.stem, [Pooling(), model.head]
    assert isinstance(model, GPT | Encoder)
    return Embeddings(model), [model.norm, model.head] if isinstance(model, GPT) else [model.head]


def split(model: nn.Module, blocks: list[nn.Module], stages: int) -> list[nn.Module]:
    """Return the stages of a model, with as many layers each as can be."""
    first, last = ends(model)
    cuts = [len(blocks) * stage // stages for stage in range(stages + 1)]
    parts = [blocks[start:end] for start, end in pairwise(cuts)]
    parts[0].insert(0, first)
    parts[-1].extend(last)
    return [nn.Sequential(*part) for part in parts]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean loss of a micro-batch: of rows alone, or of rows of tokens."""
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def pipelined(parts: list[nn.Module], schedule: str) -> tuple[Train, nn.ModuleList]:
    """Return what takes the gradients of a batch, and the stages of this rank.

    Every rank is given the whole batch. What is returned is the mean loss on the last rank, for
    only it knows the loss, and zero on the others.
    """
    ranks = dist.get_world_size()
    mine = range(dist.get_rank(), len(parts), ranks)
    device = torch.device("cpu")
    stages = [PipelineStage(parts[index], index, len(parts), device) for index in mine]
    many = micro_batches(ranks)
    runner: PipelineScheduleSingle | PipelineScheduleMulti
    if schedule in ONE_STAGE:
        runner = ONE_STAGE[schedule](stages[0], many, loss_fn=loss_of)
    else:
        runner = ANY_STAGES[schedule](stages, many, loss_fn=loss_of)
    tied, ends_of_tied = _tied(parts), dist.new_group([0, ranks - 1])

    def train(x: Tensor, y: Tensor) -> Tensor:
        losses: list[Tensor] = []
        inputs = (x,) if stages[0].is_first else ()
        target = y if stages[-1].is_last else None
        runner.step(*inputs, target=target, losses=losses, return_outputs=False)
        if stages[0].is_first or stages[-1].is_last:
            for weight in tied:
                dist.all_reduce(weight.grad, group=ends_of_tied)
        return torch.stack(losses).mean() if losses else torch.zeros(())

    return train, nn.ModuleList(parts[index] for index in mine)


def _tied(parts: list[nn.Module]) -> list[nn.Parameter]:
    """Return the weights that the first and the last stage have both; each has a copy of them."""
    last = set(parts[-1].parameters())
    return [weight for weight in parts[0].parameters() if weight in last]
