"""Under batch="global", what crosses the border is the value of one device, on every rank."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from tests.harness.worlds import run

f64 = torch.float64
STRATEGIES = {
    "ddp": {"zero": 0},
    "zero3": {"zero": 3},
    "tp": {"tp": 2},
    "cp": {"cp": 2},
    "pp": {"pp": 2, "micro_batches": 2},
}


def values(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=f64, generator=torch.Generator().manual_seed(seed))


def compiled(model: nn.Module, strategy: str = "ddp", **options: Any) -> Any:
    fixed = autopar.Strategy(recompute="none", **STRATEGIES[strategy])
    cluster = autopar.Cluster.default(2, "cpu")
    return autopar.compile(model, strategy=fixed, cluster=cluster, **options)


class Encoder(nn.Module):
    """Returns rows, and a loss beside them if it is given targets."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))

    def forward(self, x: Tensor, target: Tensor | None = None) -> Any:
        h = self.layers(x)
        return h if target is None else (F.mse_loss(h, target), h)


def contrastive(h: Tensor) -> Tensor:
    h = F.normalize(h, dim=1)
    similar = h @ h.T / 0.5
    return torch.logsumexp(similar, 1).mean() - similar.diagonal().mean()


def loss_of_rows(model: Any, head: nn.Module, x: Tensor, rows: int) -> Tensor:
    return contrastive(model(x))


def loss_of_head(model: Any, head: nn.Module, x: Tensor, rows: int) -> Tensor:
    return (head(model(x)).std(0) - values(1, 6)).square().sum()


def loss_beside(model: Any, head: nn.Module, x: Tensor, rows: int) -> Tensor:
    loss, h = model(x, values(7, rows, 6))
    return loss + contrastive(h) + h[1:].sum() + head(h.mul(2)).square().mean()


LOSSES = [loss_of_rows, loss_of_head, loss_beside]


def trains_alike(rank: int, world_size: int, *, strategy: str, rows: int) -> None:
    for loss_of in LOSSES:
        results = []
        torch.manual_seed(0)
        plain, plain_head = Encoder().to(f64), nn.Linear(6, 6).to(f64)
        parallel = compiled(copy.deepcopy(plain), strategy)
        for model, head in (plain, plain_head), (parallel, copy.deepcopy(plain_head)):
            ours = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
            theirs = torch.optim.SGD(head.parameters(), 0.1, momentum=0.9)
            losses = []
            for step in range(2):
                x = values(step, rows, 6).requires_grad_(strategy != "pp")
                loss = loss_of(model, head, x, rows)
                loss.backward()
                losses += [loss.detach(), *([] if x.grad is None else [x.grad])]
                for optimizer in ours, theirs:
                    optimizer.step()
                    optimizer.zero_grad()
            state = model.state_dict() if model is plain else model.full_state_dict()
            results.append([*losses, *state.values(), *head.state_dict().values()])
        for own, wanted in zip(results[1], results[0], strict=True):
            torch.testing.assert_close(own, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("strategy", "rows"), [("ddp", 5), ("zero3", 6), ("tp", 6), ("cp", 6), ("pp", 6)]
)
def test_losses_in_the_loop_are_those_of_one_device(strategy: str, rows: int) -> None:
    run(trains_alike, 2, strategy=strategy, rows=rows)


class Untraceable(Encoder):
    """Trains under torch's data parallelism: Python reads a value."""

    def forward(self, x: Tensor, target: Tensor | None = None) -> Any:
        return super().forward(x if x.sum() > 1e9 else x * 1, target)


def falls_back(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    plain = Untraceable().to(f64)
    parallel = compiled(copy.deepcopy(plain))
    inputs = [values(0, 5, 6).requires_grad_() for _ in range(2)]
    for model, x in zip((plain, parallel), inputs, strict=True):
        contrastive(model(x)).backward()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
    for own, wanted in zip(parallel.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, wanted.grad)


def test_losses_in_the_loop_are_exact_under_the_fallback() -> None:
    run(falls_back, 2)


# -- rows beside a loss ------------------------------------------------------------------------


def reads(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    plain = Encoder().to(f64)
    parallel = compiled(copy.deepcopy(plain))
    x, target = values(0, 6, 6), values(1, 6, 6)
    wanted, (loss, rows) = plain(x, target)[1], parallel(x, target)
    assert rows.shape == (6, 6)
    assert rows.detach().requires_grad is False
    assert rows._rows.whole is None, "nobody has read them"
    loss.backward(retain_graph=True)
    torch.testing.assert_close(torch.from_numpy(rows.detach().numpy()), wanted.detach())
    torch.testing.assert_close(rows.tolist(), wanted.tolist())
    assert str(rows[0, 0].item()) in repr(rows.double().tolist())
    torch.testing.assert_close(copy.deepcopy(rows.detach()) + 1, wanted.detach() + 1)
    with torch.no_grad():
        loss, rows = parallel(x, target)
        torch.testing.assert_close(rows, wanted.detach())
        rows.mul_(2)[0] = 0
        torch.testing.assert_close(rows[1:], 2 * wanted[1:].detach())
        assert rows[0].norm() == 0
        torch.testing.assert_close(parallel(x), wanted.detach())


def test_rows_beside_a_loss_are_read_later() -> None:
    run(reads, 2)


def reads_alone(rank: int, world_size: int) -> None:
    parallel = compiled(Encoder().to(f64))
    loss, rows = parallel(values(0, 6, 6), values(1, 6, 6))
    if rank == 0:
        rows.sum()
    loss.backward()


def test_a_rank_that_reads_alone_is_told() -> None:
    for answer in run(reads_alone, 2, expect_errors=True):
        assert answer.type.endswith("DisagreementError")
        assert "rank(s) [0]: reads the rows of output 1 of call 1 of Encoder" in answer.message


# -- gradients ---------------------------------------------------------------------------------


def other_loss(rank: int, world_size: int) -> None:
    parallel = compiled(Encoder().to(f64))
    (parallel(values(0, 6, 6)) * (rank + 1)).square().mean().backward()


def test_another_loss_on_a_rank_is_told() -> None:
    for answer in run(other_loss, 2, expect_errors=True):
        assert answer.type.endswith("DisagreementError")


def own(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    plain = Encoder().to(f64)
    parallel = compiled(copy.deepcopy(plain), outputs="own")
    x = values(0, 6, 6)
    rows = parallel(x)
    part = parallel.own_rows(6)
    assert rows.shape == (3, 6)
    torch.testing.assert_close(rows, plain(x)[part])
    rows.square().mean().backward()
    plain(x).square().mean().backward()
    for a, b in zip(parallel.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_own_rows_are_given_on_request() -> None:
    run(own, 2)
