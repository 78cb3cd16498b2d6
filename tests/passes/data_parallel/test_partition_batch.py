"""Slices of the batch compute what one device computes, gradients included.

Each case is the loss of a small model, run on two ranks with 3 and 2 of 5 rows; the targets of
the last rank are all ignored. Values typed Replicate are compared between ranks on the way.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.core.ir.graph import TrainingGraph
from autopar.core.ir.placement import even_rows
from autopar.core.ir.roles import Gradient, Parameter, Update
from autopar.passes.data_parallel.assign_batch_axis import AssignBatchAxis
from autopar.passes.data_parallel.synchronize_gradients import SynchronizeGradients
from tests.harness.reference import relative_error
from tests.passes.parity import AXIS, EXACT, World, assert_parity

ROWS, RANKS, IGNORED = 5, 2, -1
CLASS_WEIGHTS = torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64)

Loss = Callable[["Tiny", Tensor, Tensor], Any]


class Tiny(nn.Module):
    """Two layers and a loss."""

    def __init__(self, loss: Loss, **modules: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.lin, self.head = nn.Linear(4, 6), nn.Linear(6, 3)
        self.free = nn.Parameter(torch.randn(5, 6))
        self.embedding = nn.Embedding(3, 5)
        for name, module in modules.items():
            setattr(self, name, module)
        self.loss = (loss,)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.loss[0](self, x, y)

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.lin(x))

    def logits(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(x))


def world(loss: Loss, rows: int = ROWS, **modules: nn.Module) -> World:
    gen = torch.Generator().manual_seed(3)
    x = torch.randn(rows, 4, generator=gen, dtype=torch.float64)
    y = torch.randint(3, (rows,), generator=gen)
    y[[i for i in (0, 3, 4) if i < rows]] = IGNORED
    model = Tiny(loss, **modules).double()
    return World(model, ((x, y), {}), RANKS, lambda out: out[0] if isinstance(out, tuple) else out)


def lowered(it: World) -> list[TrainingGraph]:
    return it.lower(lambda rank: (AssignBatchAxis(AXIS), SynchronizeGradients(AXIS, rank)))


# -- losses and statistics that are exact ------------------------------------------------------


def elementwise(function: Callable[..., Tensor], **options: Any) -> Loss:
    return lambda m, x, y: function(m.hidden(x)[:, :4], x, **options)


def probabilities(function: Callable[..., Tensor], **options: Any) -> Loss:
    return lambda m, x, y: function(m.hidden(x)[:, :4].sigmoid(), (x > 0).double(), **options)


def entropy(**options: Any) -> Loss:
    return lambda m, x, y: F.cross_entropy(m.logits(x), y, ignore_index=IGNORED, **options)


def standardised(m: Tiny, x: Tensor, y: Tensor) -> Tensor:
    z = m.hidden(x)
    return (((z - z.mean(0)) / (z.var(0) + 1e-3).sqrt()) ** 3).mean()


def following(m: Tiny, x: Tensor, y: Tensor) -> Tensor:
    """A language model's loss; torch neither expands nor copies the labels of a single row."""
    place = torch.arange(3, dtype=x.dtype)[None].expand(len(x), -1)
    z = m.hidden(x[:, None] * (1 + place[:, :, None]))
    labels = F.pad(y[:, None].expand(-1, 3), (0, 1), value=IGNORED)[:, 1:].contiguous()
    return F.cross_entropy(m.head(z).view(-1, 3), labels.view(-1), ignore_index=IGNORED)


def attended(m: Tiny, x: Tensor, y: Tensor) -> Tensor:
    """Attention, for which torch uses other operators at a single row."""
    z = m.hidden(x)[:, None] * x[:, :, None]
    return m.attention(z, z, z)[0].pow(3).sum() / len(x)  # type: ignore[operator]


def dense_pixels(m: Tiny, x: Tensor, y: Tensor) -> Tensor:
    maps = m.logits(x)[:, :, None, None] * x[:, None, :, None]
    targets = y[:, None, None].expand(-1, 4, 1)
    return F.cross_entropy(maps, targets, ignore_index=IGNORED)


def masked_mean(m: Tiny, x: Tensor, y: Tensor) -> Tensor:
    mask = (y != IGNORED).double()
    return (m.hidden(x).square().mean(1) * mask).sum() / mask.sum().clamp(min=1)


class OwnMean(torch.autograd.Function):
    """A mean with a custom backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.pow(3).mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 3 * x * x / x.numel() * gradient


def slope_penalty(m: Tiny, x: Tensor, y: Tensor) -> Tensor:
    """A loss that contains a gradient of the input."""
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(m.hidden(x).square().mean(), x, create_graph=True)
    return (slope.square().sum(1) + 1e-3).sqrt().mean()


def gradient_penalty(m: Tiny, x: Tensor, y: Tensor) -> Tensor:
    """A loss that contains a gradient of a parameter."""
    data = F.cross_entropy(m.logits(x), y, ignore_index=IGNORED)
    (gradient,) = torch.autograd.grad(data, m.lin.weight, create_graph=True)
    return data + gradient.square().sum()


def moving_average(m: Tiny, x: Tensor, y: Tensor) -> Tensor:
    z = m.hidden(x)
    with torch.no_grad():
        m.norm.running_mean.mul_(0.9).add_(0.1 * z.mean(0))  # type: ignore[operator,union-attr]
    return (z - m.norm.running_mean).square().mean()  # type: ignore[operator]


def with_metrics(m: Tiny, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    logits = m.logits(x)
    right = logits.argmax(-1) == y
    return F.cross_entropy(logits, y, ignore_index=IGNORED), right.double().mean(), right.sum()


def penalised(m: Tiny, x: Tensor, y: Tensor) -> Tensor:
    """A term of the gradient that is replicated must not be summed over ranks."""
    data = F.cross_entropy(m.logits(x), y, ignore_index=IGNORED)
    return data + 1e-3 * m.lin.weight.pow(2).sum() + 1e-2 * m.free.norm()


EXACT_LOSSES: dict[str, Loss] = {
    # a mean, a sum, some dims
    "mean": lambda m, x, y: m.lin(x).mean(),
    "sum": lambda m, x, y: m.lin(x).sum(),
    "mean_of_rows": lambda m, x, y: m.lin(x).mean(0).square().sum(),
    "mean_of_means": lambda m, x, y: m.lin(x).mean(1).mean(),
    "mean_transposed": lambda m, x, y: m.hidden(x).T.mean(1).square().sum(),
    "mean_flattened": lambda m, x, y: (
        (m.hidden(x)[:, None] * x[:, :, None]).flatten(0, 1).mean(0).square().sum()
    ),
    "log_of_mean": lambda m, x, y: m.hidden(x).square().mean().log(),
    "product_of_means": lambda m, x, y: m.lin(x).square().mean() * m.lin(x).mean(),
    "detached_mean": lambda m, x, y: (
        (m.hidden(x) - m.hidden(x).detach().mean(0)).square().mean()
    ),
    "masked_mean": masked_mean,
    "variance": standardised,
    "deviation": lambda m, x, y: (m.hidden(x).std(0) ** 3).sum(),
    "contraction": lambda m, x, y: (m.hidden(x).T @ m.hidden(x)).square().sum(),
    "einsum": lambda m, x, y: torch.einsum("bi,bj->ij", m.hidden(x), x).pow(3).sum(),
    "matrix_vector": lambda m, x, y: (m.hidden(x).T @ x[:, 0]).square().sum(),
    "dot": lambda m, x, y: torch.dot(m.hidden(x)[:, 0], x[:, 0]).square(),
    # numbers that count the rows
    "sum_by_rows": lambda m, x, y: m.hidden(x).square().sum() / x.shape[0],
    "parts_by_rows": lambda m, x, y: (m.hidden(x).square() / x.shape[0]).sum(),
    "sum_by_elements": lambda m, x, y: (m.hidden(x)[:, :4] - x).square().sum() / x.numel(),
    "sum_by_root": lambda m, x, y: m.hidden(x).square().sum() / x.shape[0] ** 0.5,
    "tensor_of_rows": lambda m, x, y: (
        m.hidden(x).square().sum() / torch.tensor(float(x.shape[0]))
    ),
    "full_of_rows": lambda m, x, y: m.hidden(x).square().sum() / x.new_full((), x.shape[0]),
    "sum_of_ones": lambda m, x, y: m.hidden(x).square().sum() / torch.ones(len(x)).sum(),
    "covariance": lambda m, x, y: (m.hidden(x).T @ m.hidden(x) / x.shape[0]).square().sum(),
    # losses
    "mse": elementwise(F.mse_loss),
    "mse_sum": elementwise(F.mse_loss, reduction="sum"),
    "l1": elementwise(F.l1_loss),
    "smooth_l1": elementwise(F.smooth_l1_loss, beta=0.3),
    "smooth_l1_sum": elementwise(F.smooth_l1_loss, reduction="sum"),
    "huber": elementwise(F.huber_loss, delta=0.4),
    "huber_sum": elementwise(F.huber_loss, reduction="sum"),
    "poisson": elementwise(F.poisson_nll_loss),
    "bce": probabilities(F.binary_cross_entropy),
    "bce_weighted": lambda m, x, y: F.binary_cross_entropy(
        m.hidden(x)[:, :4].sigmoid(), (x > 0).double(), weight=x.abs()
    ),
    "bce_sum": probabilities(F.binary_cross_entropy, reduction="sum"),
    "bce_logits": probabilities(F.binary_cross_entropy_with_logits),
    "bce_logits_sum": probabilities(F.binary_cross_entropy_with_logits, reduction="sum"),
    "soft_margin": lambda m, x, y: F.soft_margin_loss(m.hidden(x)[:, :4], (x > 0) * 2.0 - 1),
    "kl_batchmean": lambda m, x, y: F.kl_div(
        m.logits(x).log_softmax(-1), x[:, :3].softmax(-1), reduction="batchmean"
    ),
    "cross_entropy": entropy(),
    "cross_entropy_sum": entropy(reduction="sum"),
    "cross_entropy_weights": entropy(weight=CLASS_WEIGHTS),
    "cross_entropy_smooth": entropy(label_smoothing=0.1),
    "cross_entropy_both": entropy(weight=CLASS_WEIGHTS, label_smoothing=0.1),
    "cross_entropy_none": lambda m, x, y: entropy(reduction="none")(m, x, y).mean(),
    "cross_entropy_soft": lambda m, x, y: F.cross_entropy(m.logits(x), x[:, :3].softmax(-1)),
    "nll_2d": dense_pixels,
    "two_kinds": lambda m, x, y: entropy()(m, x, y) + elementwise(F.mse_loss)(m, x, y),
    "penalised": penalised,
    "metrics": with_metrics,
    # gradients of the user's own
    "own_mean": lambda m, x, y: OwnMean.apply(m.hidden(x)) + entropy()(m, x, y),
    "slope_penalty": slope_penalty,
    "gradient_penalty": gradient_penalty,
    # values that begin without the batch, and linear ones, whose gradients need no data
    "zeros": lambda m, x, y: m.lin(torch.zeros(len(x), 4, dtype=x.dtype)).mean() + m.lin(x).mean(),
    "expanded": lambda m, x, y: (m.free[:1].expand(len(x), -1) ** 2).mean() + m.lin(x).mean(),
    "class_token": lambda m, x, y: torch.cat(
        [m.hidden(x)[:, None], m.free.expand(len(x), -1, -1)], 1
    ).pow(3).mean(),
    "bias": lambda m, x, y: (x[:, :1] * 0 + m.free[0]).mean(),
    "embedding": lambda m, x, y: m.embedding(y.clamp(min=0)).mean(),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT_LOSSES)
def test_loss_of_the_global_batch(name: str) -> None:
    it = world(EXACT_LOSSES[name])
    graphs = lowered(it)
    assert_parity(it, graphs)
    assert graphs[0].notes == ()


# -- rows that depend on each other ------------------------------------------------------------

COUPLED_LOSSES: dict[str, Loss] = {
    "chosen": lambda m, x, y: -m.logits(x).log_softmax(-1)[torch.arange(len(x)), y.abs()].mean(),
    "maximum": lambda m, x, y: m.hidden(x).amax(0).sum(),
    "minimum": lambda m, x, y: m.hidden(x).min(0)[0].sum(),
    "median": lambda m, x, y: m.hidden(x).median(0)[0].square().sum(),
    "product": lambda m, x, y: (1 + m.hidden(x) / 9).prod(0).sum(),
    "log_sum_exp": lambda m, x, y: m.hidden(x).logsumexp(0).sum(),
    "softmax": lambda m, x, y: (m.hidden(x).softmax(0) * x[:, :1]).sum(),
    "norm": lambda m, x, y: m.hidden(x).norm(),
    "first": lambda m, x, y: m.hidden(x)[0].sum(),
    "histogram": lambda m, x, y: (
        torch.zeros(3, dtype=x.dtype).index_add(0, y.abs(), m.hidden(x).sum(1)).square().sum()
    ),
    "similarities": lambda m, x, y: (m.hidden(x) @ m.hidden(x).T).exp().sum(1).log().mean(),
    "distances": lambda m, x, y: (m.hidden(x)[:, None] - m.hidden(x)[None]).square().mean(),
    "differences": lambda m, x, y: (m.hidden(x)[1:] - m.hidden(x)[:-1]).square().mean(),
    "rolled": lambda m, x, y: (m.hidden(x).roll(1, 0) - x[:, :1]).square().mean(),
    "reversed": lambda m, x, y: (m.hidden(x.flip(0)) * x[:, :1]).square().mean(),
    "sorted": lambda m, x, y: (m.hidden(x).sort(0)[0] * x[:, :1]).mean(),
    "cumulated": lambda m, x, y: (m.hidden(x).cumsum(0) * x[:, :1]).tanh().mean(),
    "numbered": lambda m, x, y: (m.hidden(x).mean(1) * torch.arange(len(x))).mean(),
    "queued": lambda m, x, y: torch.cat([m.hidden(x), m.free]).square().mean(),
    "convolved": lambda m, x, y: (
        F.conv1d(m.hidden(x).T[None], m.lin.weight[:, None, :3], groups=6).square().mean()
    ),
    "one_by_one": lambda m, x, y: torch.stack([m.hidden(r).square().mean() for r in x]).mean(),
    "differentiated_twice": lambda m, x, y: (
        torch.autograd.grad(F.mse_loss(m.hidden(x)[:, :4], x), m.lin.weight, create_graph=True)[0]
        .square()
        .sum()
    ),
}


@pytest.mark.parametrize("name", COUPLED_LOSSES)
def test_rows_that_depend_on_each_other(name: str) -> None:
    it = world(COUPLED_LOSSES[name])
    assert_parity(it, lowered(it))


def test_gathers_are_noted_with_the_users_line() -> None:
    notes = world(COUPLED_LOSSES["sorted"]).graph(0).notes
    assert any("sort.default" in n and "test_partition_batch.py" in n for n in notes)


def cached(m: Tiny, x: Tensor, y: Tensor) -> Tensor:
    """Keys behind an empty cache, as transformers starts one."""
    keys = torch.cat([torch.tensor([], dtype=x.dtype), m.hidden(x)[:, None]], dim=-2)
    return F.cross_entropy(m.head(keys[:, 0]), y, ignore_index=IGNORED)


def test_an_empty_cache_gathers_no_rows() -> None:
    it = world(cached)
    assert not any("needs all rows" in note for note in it.graph(0).notes)
    assert_parity(it, lowered(it))


# -- batch norm --------------------------------------------------------------------------------


def normed(m: Tiny, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.head(m.norm(m.hidden(x))), y, ignore_index=IGNORED)  # type: ignore


def normed_maps(m: Tiny, x: Tensor, y: Tensor) -> Tensor:
    return m.norm((m.hidden(x)[:, :, None] * x[:, None])[..., None]).pow(3).mean()  # type: ignore


NORMS: dict[str, tuple[nn.Module, Loss]] = {
    "1d": (nn.BatchNorm1d(6), normed),
    "momentum": (nn.BatchNorm1d(6, momentum=0.3), normed),
    "no_affine": (nn.BatchNorm1d(6, affine=False), normed),
    "no_statistics": (nn.BatchNorm1d(6, track_running_stats=False), normed),
    "neither": (nn.BatchNorm1d(6, affine=False, track_running_stats=False), normed),
    "frozen": (nn.BatchNorm1d(6).requires_grad_(False), normed),
    "eval": (nn.BatchNorm1d(6).eval(), normed),
    "2d": (nn.BatchNorm2d(6), normed_maps),
    "instance": (nn.InstanceNorm2d(6, affine=True, track_running_stats=True), normed_maps),
    "group": (nn.GroupNorm(2, 6), normed_maps),
    "moving_average": (nn.BatchNorm1d(6, affine=False), moving_average),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NORMS)
def test_norm_over_the_global_batch(name: str) -> None:
    norm, loss = NORMS[name]
    it = world(loss, norm=norm)
    assert_parity(it, lowered(it), tolerance=1e-11)  # instance norm divides by small numbers


@pytest.mark.parametrize("rows", [2, 3])
@pytest.mark.parametrize("loss", [following, attended])
def test_ranks_of_a_single_row(loss: Loss, rows: int) -> None:
    it = world(loss, rows, attention=nn.MultiheadAttention(6, 2, batch_first=True))
    assert_parity(it, lowered(it))


# -- local semantics ---------------------------------------------------------------------------


def own_losses(it: World) -> tuple[list[int], list[dict[str, Any]]]:
    """The results of the plain model for each rank's rows."""
    rows = list(even_rows(ROWS, RANKS))
    parts = [replace(it, batch=(it.share(r).tensors, {})).plain() for r in range(RANKS)]
    found = [
        {"outputs": {0: p.outputs[0]}, "gradients": p.gradients, "buffers": p.buffers}
        for p in parts
    ]
    return rows, found


def weighted(
    parts: list[dict[str, Any]], select: Callable[[dict[str, Any]], Any]
) -> dict[Any, Any]:
    """The mean of selected results over ranks, weighted by rows."""
    chosen = [select(part) for part in parts]
    rows = even_rows(ROWS, RANKS)
    return {k: sum(c[k] * n / ROWS for c, n in zip(chosen, rows, strict=True)) for k in chosen[0]}


def test_local_batch_norm_averages_running_statistics() -> None:
    it = replace(world(normed, norm=nn.BatchNorm1d(6)), local=True)
    results = it.run(lowered(it))
    _, parts = own_losses(it)
    gradients = weighted(parts, lambda part: part["gradients"])
    assert (
        relative_error(results[0][Gradient(Parameter("lin.weight"))], gradients["lin.weight"]) > 0
    )
    means = weighted(parts, lambda part: part["buffers"])
    for role in [r for r in results[0] if isinstance(r, Update) and "running" in r.of.name]:  # type: ignore[union-attr]
        assert relative_error(results[0][role], means[role.of.name]) < EXACT  # type: ignore
