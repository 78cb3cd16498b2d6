"""Relations between whole searches, between processes, and between two ways to one answer."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import autopar
from autopar.core.plan.prediction import Prediction
from tests.metamorphic.questions import Question, Tower

ROOT = Path(__file__).resolve().parents[2]
TOWER = Question("gpt", 256, 3, 32, 128)
ANSWER = """
import json
from tests.metamorphic.questions import Question
found = Question("llama", 64, 2, 16, 32, axes=(("tp", 2),)).candidate(zero=3)
cost = found.prediction
print(json.dumps([cost.step_s, cost.memory, found.plan.sent_bytes, str(found.plan.partitions)]))
"""


def searched(memory: int | None, world_size: int = 8, **strategy: object) -> Prediction:
    """The prediction of the plan that a search finds under a cap in bytes."""
    with torch.device("meta"):
        model, x = Tower(TOWER), torch.empty(TOWER.rows, TOWER.length, TOWER.width)
    plan = autopar.plan(
        model,
        world_size,
        example_inputs=(x,),
        cluster=autopar.Cluster.named("dgx-a100", 1),
        memory=memory,
        strategy=autopar.Strategy(**{"tp": 1, "pp": 1, "cp": 1, "prefetch": 1} | strategy),
        time_limit_s=None,
    )
    assert plan.prediction is not None
    return plan.prediction


@pytest.mark.slow
def test_more_memory_is_never_slower() -> None:
    """A search under caps that double, down from what its fastest plan needs."""
    fastest = searched(None)
    caps = [fastest.needed_bytes * part // 4 for part in (3, 4, 8)]
    found = [*map(searched, caps), fastest]
    for cost, cap in zip(found, caps, strict=False):
        assert cost.fits(cap)
    assert all(more.step_s <= less.step_s * 1.001 for less, more in pairwise(found))


@pytest.mark.slow
def test_a_free_choice_is_never_slower_than_a_fixed_one() -> None:
    """The search over ZeRO stages beside each stage alone."""
    free = searched(None)
    for stage in (0, 1, 3):
        assert free.step_s <= searched(None, zero=stage).step_s * 1.001


@pytest.mark.slow
def test_another_process_gives_the_same_answer() -> None:
    """Hash seeds order sets; none of them may order a plan."""
    answers = []
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", ANSWER],
            env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        answers.append(json.loads(done.stdout.splitlines()[-1]))
    assert answers[0] == answers[1]


def test_seeds_change_nothing() -> None:
    """A model of other values is the same model; a question asked twice has one answer."""
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        # Another name is another capture, as in a new process.
        question = replace(Question("gpt", 64, 2, 16, 32), name=f"blocks_{seed}")
        found.append(question.candidate(zero=3))
    one, two = (candidate.prediction for candidate in found)
    assert (one.step_s, one.memory, one.waits) == (two.step_s, two.memory, two.waits)
