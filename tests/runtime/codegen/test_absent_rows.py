"""What stands for logits that are left out says so to whatever reads it."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from autopar.errors import StrategyError
from autopar.runtime.codegen.absent_rows import AbsentRows

ABSENT = AbsentRows((4, 5), torch.bfloat16)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.argmax(-1),
        lambda x: torch.argmax(x, -1),
        lambda x: torch.ones(4, 5) + x,
        lambda x: x + 1,
        lambda x: x[..., :-1, :],
        lambda x: -x,
        lambda x: x == 1,
        lambda x: list(x),
        lambda x: float(x),
        lambda x: torch.nn.functional.softmax(x, -1),
        lambda x: torch.stack([x]),
        lambda x: x.dtype,
    ],
)
def test_reading_raises(read: Callable[[Any], Any]) -> None:
    with pytest.raises(StrategyError, match=r"\(4, 5\) is read.*loss_chunks=1"):
        read(ABSENT)


def test_it_is_shown_and_passed_on() -> None:
    assert repr(ABSENT) == "AbsentRows(shape=(4, 5), dtype=torch.bfloat16)"
    assert not hasattr(ABSENT, "dtype")
    for same in (copy.deepcopy(ABSENT), pickle.loads(pickle.dumps(ABSENT))):
        assert repr(same) == repr(ABSENT)
    assert len({ABSENT, ABSENT}) == 1
