"""`model.metrics()`: figures of the last steps under data parallelism, ZeRO and pipelines."""

import time
from typing import Any

import pytest
import torch

import autopar
from autopar.runtime.watch.steps import WINDOW
from benchmarks.models import GPT
from tests.harness.worlds import run

ROWS, TOKENS, SLEEP_S = 4, 8, 0.1
STRATEGIES = {"ddp": "ddp", "zero3": "zero3", "pp": autopar.Strategy(pp=2, micro_batches=2)}


def train(rank: int, world_size: int, *, strategy: Any) -> dict[str, float]:
    """Five steps in which rank 1 sleeps, with an evaluation that belongs to none."""
    torch.manual_seed(0)
    ids = torch.randint(32, (ROWS, TOKENS))
    model = autopar.compile(
        GPT(2, 32, tied=False, width=16, heads=2),
        strategy=STRATEGIES[strategy],
        memory="1GiB",  # so that the plan has a prediction
        example_inputs=(ids, ids),
    )
    assert "step_s" not in model.metrics()
    for step in range(6):
        if step == 3:
            with torch.no_grad():
                model(ids, ids)
            time.sleep(1.0)
        model(ids, ids).backward()
        time.sleep(SLEEP_S * rank)
    return model.metrics()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_measured_beside_predicted(strategy: str) -> None:
    first, second = run(train, 2, strategy=strategy)
    for found in (first, second):
        assert all(type(value) is float for value in found.values())
        # a rank that was late into a step, as on busy cores, has less of the next sleep in it
        assert 0.5 * SLEEP_S <= found["step_s"] < 1.0
        assert found["rows_per_s"] == pytest.approx(ROWS / found["step_s"], rel=0.5)
        assert found["tokens_per_s"] == pytest.approx(TOKENS * found["rows_per_s"])
        assert found["memory_bytes"] > 2**20
        assert {f"predicted_{n}" for n in ("step_s", "exposed_s", "memory_bytes")} <= set(found)
    assert first["exposed_s"] > 0.5 * SLEEP_S > second["exposed_s"]  # it waits for the sleeper


def test_a_window_of_steps_on_one_rank() -> None:
    model = autopar.compile(torch.nn.Linear(2, 2), strategy="ddp")
    for _ in range(WINDOW + 3):
        model(torch.ones(3, 2)).sum().backward()
    assert len(model._execution.watch.steps) == WINDOW
    found = model.metrics()
    assert "tokens_per_s" not in found
    assert "mfu" not in found
    assert found["exposed_s"] == 0.0
