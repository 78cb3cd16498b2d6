"""Every shipped cluster answers, whatever the architecture, with its first plan."""

from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.cost_model.cluster.cluster import shipped_clusters
from tests.harness.models import MODELS
from tests.planner.blocks import Experts, GPTBlock, LlamaBlock, Stack


def stack(block: Callable[[], nn.Module]) -> tuple[nn.Module, Any]:
    with torch.device("meta"):
        return Stack(block, 1), (torch.empty(144, 64, 128),)


def conv() -> tuple[nn.Module, Any]:
    case = MODELS["conv"]
    return case.make(), case.batch(144, 0)[0]


ARCHITECTURES: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "gpt": lambda: stack(lambda: GPTBlock(128, 4)),
    "llama": lambda: stack(lambda: LlamaBlock(128, 4, 2)),
    "vit": lambda: stack(lambda: GPTBlock(128, 4, causal=False)),
    "resnet": conv,
    "moe": lambda: stack(lambda: Experts(128, 8, 16)),
}
QUESTIONS = list(
    zip(cycle(shipped_clusters()), [*ARCHITECTURES] * 3, cycle(("auto", "fastest")), strict=False)
)
"""Each cluster, each architecture, both strategies; not all combinations."""


@pytest.mark.parametrize(("cluster", "architecture", "strategy"), QUESTIONS)
def test_it_answers(cluster: str, architecture: str, strategy: str) -> None:
    model, inputs = ARCHITECTURES[architecture]()
    known = autopar.Cluster.named(cluster)
    more: dict[str, Any] = {"strategy": strategy, "cluster": known, "time_limit_s": 0.0}
    plan = autopar.plan(model, known.world_size, example_inputs=inputs, **more)
    assert plan.prediction is not None
    assert 0 < plan.prediction.step_s < 1
    assert plan.search is not None
    assert plan.search.bound_s <= plan.prediction.step_s


def test_all_are_asked() -> None:
    asked = [set(part) for part in zip(*QUESTIONS, strict=True)]
    assert asked == [{*shipped_clusters()}, {*ARCHITECTURES}, {"auto", "fastest"}]
