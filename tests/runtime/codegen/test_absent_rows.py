"""What stands for logits that are left out says so to whatever reads it."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from autopar.errors import StrategyError
from autopar.runtime.codegen.absent_rows import AbsentRows

ABSENT = AbsentRows(1)


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
        lambda x: x.shape[0],
        lambda x: f"{x:.3f}",
        lambda x: x << 1,
        lambda x: torch.as_tensor(x),
        lambda x: setattr(x, "data", torch.ones(4, 5)),
        lambda x: pickle.dumps(x),
    ],
)
def test_reading_raises(read: Callable[[Any], Any]) -> None:
    with pytest.raises(StrategyError, match=r"output 1 .* is read.*loss_chunks=1"):
        read(ABSENT)


def test_it_is_shown_and_passed_on() -> None:
    assert repr(ABSENT) == "AbsentRows(output 1)"
    assert not hasattr(ABSENT, "dtype")
    assert copy.deepcopy({"logits": ABSENT})["logits"] is copy.copy(ABSENT) is ABSENT
    assert len({ABSENT, ABSENT}) == 1
