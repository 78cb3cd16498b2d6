"""Functions of torch in forms that can be traced: other operators, the same results.

Some of torch's functions look at values, keep hidden state while autograd records, or have strides
that fake tensors predict wrongly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from autopar._torch import without_onednn


def traceable(function: Callable[..., Any]) -> Callable[..., Any]:
    """The form of a function of torch that can be traced; most are their own."""
    return _FORMS.get(function, function)


def _batch_norm(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A batch norm of a contiguous input, to which a contiguous gradient returns.

    Of other inputs torch's fake tensors predict strides that kernels do not give. A tensor in
    channels-last format keeps it.
    """

    def contiguous(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        wanted = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
        if wanted is None or not x.is_contiguous(memory_format=wanted):
            wanted = torch.contiguous_format
        result: Tensor = norm(x.contiguous(memory_format=wanted), *args, **kwargs)
        if result.requires_grad:
            result.register_hook(lambda gradient: gradient.contiguous(memory_format=wanted))
        return result

    return contiguous


def _lstm(*args: Any, **kwargs: Any) -> Any:
    """An LSTM time step by time step.

    oneDNN's fused layer keeps a workspace only while autograd records, and captured programs run
    without it.
    """
    with without_onednn():
        return torch.lstm(*args, **kwargs)


def _cov(x: Tensor, *, correction: int = 1, **weights: Any) -> Tensor:
    """`torch.cov` of observations that weigh alike, which looks at the degrees of freedom."""
    if x.dim() > 2 or x.dtype == torch.bool or any(w is not None for w in weights.values()):
        return torch.cov(x, correction=correction, **weights)
    rows = x if x.dim() == 2 else x.view(1, -1)
    count = rows.shape[1]
    centred = rows - rows.sum(1, keepdim=True) / count
    return (centred @ centred.t().conj() / max(count - correction, 0)).squeeze()


def _corrcoef(x: Tensor) -> Tensor:
    """`torch.corrcoef`, by `_cov`."""
    found = _cov(x)
    if found.dim() == 0:
        return found / found
    deviation = found.diagonal().real.sqrt() if found.is_complex() else found.diagonal().sqrt()
    scaled = found / deviation[:, None] / deviation[None, :]
    if scaled.is_complex():
        return torch.complex(scaled.real.clamp(-1, 1), scaled.imag.clamp(-1, 1))
    return scaled.clamp(-1, 1)


_FORMS: dict[Any, Callable[..., Any]] = {
    nn.functional.batch_norm: _batch_norm(nn.functional.batch_norm),
    torch.batch_norm: _batch_norm(torch.batch_norm),
    torch.lstm: _lstm,
    torch.cov: _cov,
    torch.Tensor.cov: _cov,
    torch.corrcoef: _corrcoef,
    torch.Tensor.corrcoef: _corrcoef,
}
