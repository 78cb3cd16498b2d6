"""Bounds of states beside the shards that ZeRO makes of mixtures of experts."""

import pytest
import torch

from autopar.core.ir.graph import ParameterInfo
from autopar.planner.search.state_bytes import least_gathered_bytes, least_state_bytes, padding


def experts(count: int) -> ParameterInfo:
    return ParameterInfo("experts", (count, 4, 4), torch.float32, True, "block")


DENSE = ParameterInfo("dense", (64,), torch.float32, True, "")
FROZEN = ParameterInfo("frozen", (64,), torch.float32, False, "")


@pytest.mark.parametrize(("count", "ranks", "held"), [(8, 16, 1), (8, 12, 1), (64, 48, 2)])
def test_a_rank_holds_whole_experts_where_no_dim_divides_better(
    count: int, ranks: int, held: int
) -> None:
    """Parameter, gradient and two moments of 64 bytes each."""
    least = least_state_bytes([experts(count)], {"block": 3}, ranks, 2.0)
    assert least == pytest.approx(held * 64 * 4)
    assert padding([experts(count)], ranks) == pytest.approx(ranks * held / count)


@pytest.mark.parametrize(
    ("stage", "accumulates", "copies"),
    [
        (0, False, 4),
        (1, False, 1 + 3 / 4),
        (1, True, 2 + 2 / 4),
        (2, True, 1 + 3 / 4),
        (3, True, 1),
    ],
)
def test_stages(stage: int, accumulates: bool, copies: float) -> None:
    stages = {"": stage}
    least = least_state_bytes([DENSE], stages, 4, 2.0, accumulates=accumulates)
    assert least == pytest.approx(DENSE.bytes * copies)
    frozen = least_state_bytes([FROZEN], stages, 4, 2.0, accumulates=accumulates)
    assert frozen == pytest.approx(FROZEN.bytes * (0.25 if stage == 3 else 1.0))


def test_another_dim_is_divided_where_ranks_outnumber_experts() -> None:
    info = ParameterInfo("experts", (8, 32, 16), torch.float32, True, "block")
    least = least_state_bytes([info], {"block": 3}, 16, 2.0)
    assert least == info.bytes * 4 / 16
    assert padding([info], 16) == 1.0


def test_a_gathered_parameter_is_padded_unless_whole_copies_are_smaller() -> None:
    assert least_gathered_bytes([DENSE, experts(8)], 12, 2.0) == 12 * 64
    assert least_gathered_bytes([experts(2)], 1000, 2.0) == 2 * 64 * 4 * 3 / 4
    assert least_gathered_bytes([DENSE, experts(8)], 1, 2.0) == 0.0
