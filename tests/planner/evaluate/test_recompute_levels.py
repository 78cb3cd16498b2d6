"""Each level of recomputation takes at most the memory of the one before, along every axis."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import autopar
from autopar.core.plan.recompute import ALL_LEVELS
from autopar.planner.evaluate.candidate import default_config
from examples.plan_llama import Llama, Size
from tests.planner.problems import evaluator_of, problem_of


@pytest.mark.parametrize(("axis", "zero"), [("tp", 1), ("cp", 3)])
def test_more_recomputation_never_takes_more_memory(axis: str, zero: int) -> None:
    """Peaks of a llama whose activations outweigh its parameters."""
    rng = random.Random(axis)
    width, length = rng.choice((256, 384)), rng.choice((512, 1024))
    with torch.device("meta"):
        model = Llama(Size(width, 3 * width, 4, 4, rng.choice((2, 4)), 512))
        rows = torch.zeros(16, length, dtype=torch.long)
    strategy = autopar.Strategy(**{axis: 2})
    cluster = autopar.Cluster.named("dgx-h100")
    problem = problem_of(model, strategy, cluster=cluster, comm_backend="nccl")
    problem = replace(problem, device=torch.device("cuda"))
    evaluator, _ = evaluator_of(model, (rows, rows), problem)
    peaks = []
    for level in ALL_LEVELS[:-1]:
        config = default_config(replace(strategy, recompute=level), problem.blocks, zero)
        peaks.append(evaluator.evaluate(config).prediction.peak_bytes)
    assert all(after <= before for before, after in pairwise(peaks)), peaks
    assert peaks[-1] < 0.7 * peaks[0]
