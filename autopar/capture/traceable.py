"""Traceable forms of torch functions: other operators with the same results.

Some torch functions read tensor values, keep hidden state while autograd records, or have strides
that fake tensors predict wrongly.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from autopar._torch import BatchNorm, dense_flex_attention, patched, without_onednn
from autopar.capture.channels_last import FORMATS
from autopar.core.common.notices import warn_once
from autopar.core.operators.attention import attention_like
from autopar.core.operators.checked import checked
from autopar.core.operators.ctc import ctc_like, select_like
from autopar.core.operators.direct_calls import DIRECT_CALLS
from autopar.core.operators.experts import grouped_form
from autopar.errors import AutoparWarning


def traceable(function: Callable[..., Any]) -> Callable[..., Any]:
    """The traceable form of a torch function; the function itself for most."""
    return _FORMS.get(function) or grouped_form(function) or function


@contextlib.contextmanager
def traceable_modules() -> Iterator[None]:
    """Replaces forwards of torch modules, and FlexAttention, with traceable ones."""
    norms = patched(BatchNorm, "forward", _norm_of_all_batches(BatchNorm.forward))
    with norms, dense_flex_attention(_tell_of_dense_flex_attention):
        yield


def _tell_of_dense_flex_attention() -> None:
    warn_once(
        AutoparWarning,
        "FlexAttention is captured as its dense formula: it is divided like other operators, but "
        "keeps a score for each pair of positions and skips no block. For long sequences use "
        "scaled_dot_product_attention, which runs a fused kernel.",
    )


def _norm_of_all_batches(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A batch norm whose running statistics are means over all batches (`momentum=None`).

    torch reads the number of batches from a buffer as a Python number.
    """

    def counted(self: Any, x: Tensor) -> Tensor:
        if self.momentum is not None or not self.training or self.num_batches_tracked is None:
            return forward(self, x)
        self._check_input_dim(x)
        self.num_batches_tracked.add_(1)
        kept = [self.running_mean, self.running_var]
        own = [statistic.clone() for statistic in kept]
        result = nn.functional.batch_norm(
            x, own[0], own[1], self.weight, self.bias, training=True, momentum=1.0, eps=self.eps
        )
        weight = 1.0 / self.num_batches_tracked.double()
        for statistic, new in zip(kept, own, strict=True):
            statistic.copy_(weight * new + (1 - weight) * statistic)
        return result

    return counted


def _batch_norm(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A batch norm of a contiguous input with a contiguous gradient.

    For other inputs, the strides of fake tensors differ from the kernels'. Channels-last tensors
    keep their format.
    """

    def contiguous(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        wanted = FORMATS.get(x.dim())
        if wanted is None or not x.is_contiguous(memory_format=wanted):
            wanted = torch.contiguous_format
        result: Tensor = norm(x.contiguous(memory_format=wanted), *args, **kwargs)
        if result.requires_grad:
            result.register_hook(lambda gradient: gradient.contiguous(memory_format=wanted))
        return result

    return contiguous


def _lstm(*args: Any, **kwargs: Any) -> Any:
    """An LSTM, unrolled over time steps.

    oneDNN's fused layer keeps a workspace only while autograd records, and captured programs run
    without it.
    """
    with without_onednn():
        return torch.lstm(*args, **kwargs)


def _cov(x: Tensor, *, correction: int = 1, **weights: Any) -> Tensor:
    """`torch.cov` without weights; torch reads the degrees of freedom as a Python number."""
    if x.dim() > 2 or x.dtype == torch.bool or any(w is not None for w in weights.values()):
        return torch.cov(x, correction=correction, **weights)
    rows = x if x.dim() == 2 else x.view(1, -1)
    count = rows.shape[1]
    centred = rows - rows.sum(1, keepdim=True) / count
    return (centred @ centred.t().conj() / max(count - correction, 0)).squeeze()


def _corrcoef(x: Tensor) -> Tensor:
    found = _cov(x)
    if found.dim() == 0:
        return found / found
    deviation = found.diagonal().real.sqrt() if found.is_complex() else found.diagonal().sqrt()
    scaled = found / deviation[:, None] / deviation[None, :]
    if scaled.is_complex():
        return torch.complex(scaled.real.clamp(-1, 1), scaled.imag.clamp(-1, 1))
    return scaled.clamp(-1, 1)


def _bincount(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """`torch.bincount` into `minlength` bins; a value beyond them is a BatchError in the program.

    torch adds bins for larger values, so its result has a data-dependent shape.
    """
    if minlength < 1 or x.dim() != 1 or x.dtype.is_floating_point:
        return torch.bincount(x, weights, minlength)
    if weights is None:
        weights = torch.ones_like(x, dtype=torch.long)
    elif weights.dtype != torch.float32:
        weights = weights.double()
    beyond = f"bincount: a value is no bin of the {minlength} that minlength allows"
    bins = checked(x.long(), (x < 0) | (x >= minlength), beyond)
    return weights.new_zeros(minlength).scatter_add(0, bins, weights.detach())


def _lstsq(a: Tensor, b: Tensor, rcond: float | None = None, *, driver: str | None = None) -> Any:
    """`torch.linalg.lstsq` by the pseudoinverse, which is how torch differentiates it.

    Residuals need full rank, as in torch; without it, a program that reads them is a BatchError.
    """
    driver = driver or ("gels" if a.is_cuda else "gelsy")
    rows, width = a.shape[-2:]
    is_vector = b.dim() == 1 or (a.dim() - 1 == b.dim() and b.shape == a.shape[:-1])
    columns = b.unsqueeze(-1) if is_vector else b
    solution = torch.linalg.pinv(a, rtol=rcond) @ columns
    with torch.no_grad():
        rank = torch.linalg.matrix_rank(a, rtol=rcond)
        values = torch.linalg.svdvals(a) if driver in ("gelsd", "gelss") else a.new_empty(0)
    residuals = a.new_empty(0)
    if rows > width and driver != "gelsy":
        squares = (a @ solution - columns).abs().square().sum(-2)
        lacks = (rank < width).unsqueeze(-1).expand_as(squares)
        residuals = checked(squares, lacks, "lstsq: a matrix without full rank has no residuals")
    solution = solution.squeeze(-1) if is_vector else solution
    rank = rank.new_empty(0) if driver == "gels" else rank
    named: Any = torch.return_types
    return named.linalg_lstsq((solution, residuals, rank, values))


def _combinations(x: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    """`torch.combinations` by index; torch selects by a mask."""
    if x.dim() != 1 or r < 1:
        return torch.combinations(x, r, with_replacement)
    pick = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    places = torch.tensor(list(pick(range(len(x)), r)), dtype=torch.long, device=x.device)
    return x[places.view(-1, r)]


def _gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """`gaussian_nll_loss` with tensors of one shape; its check of variances runs in the program."""
    is_reduction = reduction in ("none", "mean", "sum")
    if not is_reduction or not isinstance(var, Tensor) or var.shape != input.shape:
        return nn.functional.gaussian_nll_loss(input, target, var, full, eps, reduction)
    spread: Tensor = checked(var, var < 0, "gaussian_nll_loss: var has negative entries")
    with torch.no_grad():
        spread.clamp_(min=eps)
    loss = 0.5 * (spread.log() + (input - target) ** 2 / spread)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    if reduction == "mean":
        return loss.mean()
    return loss.sum() if reduction == "sum" else loss


def _getitem(x: Tensor, index: Any) -> Tensor:
    """An item by 0-dim tensors, which torch would read to select a slice."""
    if (split := _scalars_apart(x, index)) is None:
        return torch.Tensor.__getitem__(x, index)
    view, places = split
    return torch.ops.aten.index.Tensor(view, places)


def _setitem(x: Tensor, index: Any, value: Any) -> None:
    """Assignment to an item by 0-dim tensors."""
    if (split := _scalars_apart(x, index)) is None:
        torch.Tensor.__setitem__(x, index, value)
        return
    view, places = split
    given = value if isinstance(value, Tensor) else torch.tensor(value)
    torch.ops.aten.index_put_.default(view, places, given.to(x.dtype))


def _scalars_apart(x: Tensor, index: Any) -> tuple[Tensor, list[Tensor | None]] | None:
    """Splits an index into its 0-dim tensors and a view by its other items.

    Returns the view, and the 0-dim tensors by dim of the view. Returns None without such a
    tensor, or with items other than numbers, slices, None and `...`.
    """
    items = index if isinstance(index, tuple) else (index,)
    scalars = [_is_scalar(item) for item in items]
    others = [item for item, scalar in zip(items, scalars, strict=True) if not scalar]
    basic = (i is None or i is Ellipsis or type(i) is int or isinstance(i, slice) for i in others)
    if not any(scalars) or not all(basic):
        return None
    if not any(item is Ellipsis for item in items):
        items, scalars = (*items, Ellipsis), [*scalars, False]
    rest = tuple(slice(None) if s else item for item, s in zip(items, scalars, strict=True))
    view = x[rest]
    kept = [item for item in items if not isinstance(item, int)]
    middle = next(i for i, item in enumerate(kept) if item is Ellipsis)
    hidden = view.dim() - (len(kept) - 1)
    dims = [*kept[:middle], *[Ellipsis] * hidden, *kept[middle + 1 :]]
    return view, [item if _is_scalar(item) else None for item in dims]


def _is_scalar(item: Any) -> bool:
    whole = isinstance(item, Tensor) and not item.dtype.is_floating_point
    return whole and item.dim() == 0 and item.dtype not in (torch.bool, torch.uint8)


_FORMS: dict[Any, Callable[..., Any]] = {
    nn.functional.batch_norm: _batch_norm(nn.functional.batch_norm),
    torch.batch_norm: _batch_norm(torch.batch_norm),
    nn.functional.scaled_dot_product_attention: attention_like,
    **DIRECT_CALLS,
    torch.lstm: _lstm,
    torch.Tensor.__getitem__: _getitem,
    torch.Tensor.__setitem__: _setitem,
    torch.bincount: _bincount,
    torch.Tensor.bincount: _bincount,
    torch.combinations: _combinations,
    torch.linalg.lstsq: _lstsq,
    nn.functional.ctc_loss: ctc_like,
    torch.masked_select: select_like,
    torch.Tensor.masked_select: select_like,
    nn.functional.gaussian_nll_loss: _gaussian_nll_loss,
    torch.cov: _cov,
    torch.Tensor.cov: _cov,
    torch.corrcoef: _corrcoef,
    torch.Tensor.corrcoef: _corrcoef,
}
