"""verify: a plan beside the plain model."""

import torch

import autopar
from tests.models import MODELS
from tests.worlds import run


def verified(rank: int, world_size: int, *, name: str) -> tuple[float, str]:
    case = MODELS[name]
    torch.manual_seed(rank)  # compile gives every rank rank 0's parameters
    strategy = autopar.Strategy(
        zero=3, recompute="full", gather_bytes=1 << 12, reduce_bytes=1 << 12
    )
    result = autopar.verify(
        case.make(), example_inputs=case.batch(6, 0)[0], loss=case.loss, strategy=strategy
    )
    return result.worst, str(result)


def test_two_ranks_equal_one() -> None:
    for worst, text in run(verified, 2, name="gpt"):
        assert worst < 1e-9
        assert text.startswith("loss ")


def test_one_rank_equals_the_model() -> None:
    assert verified(0, 1, name="conv")[0] < 1e-12


class Wrong(torch.nn.Module):
    """A model that is not the same twice: the comparison must see that."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * torch.rand_like(x)).sum()


def test_a_difference_is_reported() -> None:
    assert autopar.verify(Wrong(), example_inputs=(torch.ones(4, 3),)).worst > 1e-3
