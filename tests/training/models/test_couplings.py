"""Models that couple the rows of a batch train exactly, which torch's DDP does not do.

`docs/exactness.md` has what DDP gives.
"""

import pytest
import torch

import autopar
from tests.harness.coupled import COUPLED
from tests.harness.reference import Reference, batches, reference, train_steps
from tests.harness.training import ADAMW, assert_same_training, fixed, whole_state
from tests.harness.worlds import run

STEPS = 3
ZERO = (0, 3)


def rows_of(name: str) -> tuple[int, ...]:
    """Numbers of rows: 12 are even over 2, 3 and 4 ranks, 13 over none. Halves need 14."""
    return (12, 14) if "halves" in name else (12, 13)


def train(rank: int, world_size: int, name: str) -> list[Reference]:
    """Training under every ZeRO stage and number of rows."""
    return [trained(name, zero, rows) for zero in ZERO for rows in rows_of(name)]


def trained(name: str, zero: int, rows: int) -> Reference:
    case = COUPLED[name]
    model = autopar.compile(case.make().double(), strategy=fixed(zero), fallback=False)
    optimizer = ADAMW(model.parameters())
    losses = train_steps(model, optimizer, case, batches(case, range(STEPS), rows))
    return Reference(losses, whole_state(model))


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("name", COUPLED)
def test_trains_as_on_one_device(name: str, world_size: int) -> None:
    answers = run(train, world_size, name=name)
    setups = [(zero, rows) for zero in ZERO for rows in rows_of(name)]
    for rank, answer in enumerate(answers):
        for (zero, rows), got in zip(setups, answer, strict=True):
            want = reference(COUPLED[name], STEPS, torch.float64, ADAMW, rows)
            assert_same_training(got, want, 1e-9, f"rank {rank}, zero={zero}, {rows} rows")
