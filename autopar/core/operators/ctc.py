"""`autopar::ctc_nll`: connectionist temporal classification, each row by itself.

torch's `ctc_loss` reads its lengths as Python numbers, and libraries join the targets of all rows
by `masked_select`, whose size depends on values. Neither can be captured. Here lengths are tensors,
and a mask says which targets of a row count, so that a batch of rows can be divided.

log_probs [time, rows, classes], targets [rows, labels], lengths [rows] -> [rows]

Source: Graves, Fernandez, Gomez, Schmidhuber, Connectionist Temporal Classification, 2006.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from autopar._torch import pytree, without_torch_function
from autopar.core.operators.registration import register
from autopar.errors import BatchError

aten = torch.ops.aten

_LIBRARY = torch.library.Library("autopar", "FRAGMENT")
_LIBRARY.define(
    "ctc_nll(Tensor log_probs, Tensor targets, Tensor? mask, Tensor input_lengths, "
    "Tensor target_lengths, int blank, bool zero_infinity) -> Tensor"
)
_LIBRARY.define(
    "ctc_nll_backward(Tensor gradient, Tensor log_probs, Tensor targets, Tensor? mask, "
    "Tensor input_lengths, Tensor target_lengths, int blank, bool zero_infinity) -> Tensor"
)
ctc_nll = torch.ops.autopar.ctc_nll.default
"""(log_probs, targets, mask, input_lengths, target_lengths, blank, zero_infinity) -> [rows].

The negative log-likelihood of each row's targets; infinite ones stay so.
"""

ctc_nll_backward = torch.ops.autopar.ctc_nll_backward.default
"""(gradient [rows], and the arguments of `ctc_nll`) -> the gradient of log_probs."""


# -- forms of torch's functions ----------------------------------------------------------------


class Selection:
    """The result of `masked_select`, until somebody reads it: `ctc_loss` needs the mask instead.

    Whoever else reads it gets torch's tensor, or torch's error where sizes must not depend on
    values.
    """

    def __init__(self, source: Tensor, mask: Tensor) -> None:
        self.source, self.mask = source, mask

    def tensor(self) -> Tensor:
        """The selected elements, in one dim."""
        with without_torch_function():  # this form would be called again
            return torch.masked_select(self.source, self.mask)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(cls, cls.tensor, (args, kwargs or {}))
        return func(*args, **kwargs)


def _by_tensor(name: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(self.tensor(), name)(*args)


_UNARY = ("len", "iter", "bool", "float", "int", "neg", "abs", "invert")
_BINARY = ("getitem", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "matmul", "mod")
_MIRRORED = ("add", "sub", "mul", "truediv", "floordiv", "pow")
for _name in (*_UNARY, *_BINARY, *_MIRRORED, *(f"r{each}" for each in _MIRRORED)):
    # Python looks up special methods on the class alone
    setattr(Selection, f"__{_name}__", _by_tensor(f"__{_name}__"))


def select_like(source: Tensor, mask: Tensor) -> Any:
    """`masked_select`, held back for `ctc_like` where it may take the mask: rows of integers."""
    is_labels = source.dim() == 2 and source.shape == mask.shape and not source.is_floating_point()
    if is_labels:
        return Selection(source, mask)
    return torch.masked_select(source, mask)


def ctc_like(
    log_probs: Tensor,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """`ctc_loss` by `ctc_nll` where each row has its own targets."""
    mask = targets.mask if isinstance(targets, Selection) else None
    labels = targets.source if isinstance(targets, Selection) else targets
    has_rows = log_probs.dim() == 3 and labels.dim() == 2
    if not has_rows or reduction not in ("none", "mean", "sum"):
        options = (input_lengths, target_lengths, blank, reduction, zero_infinity)
        return nn.functional.ctc_loss(log_probs, targets, *options)
    if log_probs.dtype in (torch.float16, torch.bfloat16):
        log_probs = log_probs.float()  # as autocast does; no kernel takes less
    lengths = [
        torch.as_tensor(each, dtype=torch.long, device=log_probs.device)
        for each in (input_lengths, target_lengths)
    ]
    loss = ctc_nll(log_probs, labels, mask, *lengths, blank, zero_infinity)
    if zero_infinity:
        loss = torch.where(loss == torch.inf, 0, loss)
    if reduction == "mean":
        return (loss / lengths[1].to(loss.dtype).clamp_min(1)).mean()
    return loss.sum() if reduction == "sum" else loss


# -- implementations ---------------------------------------------------------------------------


def _fake(log_probs: Tensor, *_: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1])


def _fake_backward(gradient: Tensor, log_probs: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _labels(targets: Tensor, mask: Tensor | None, lengths: Tensor) -> Tensor:
    """The targets of each row, first those that the mask selects."""
    if mask is None:
        return targets.long()
    if not torch.equal(mask.sum(1), lengths):
        raise BatchError(
            "ctc_loss is given targets joined by masked_select, whose mask selects "
            f"{mask.sum(1).tolist()} targets of the rows, and other target_lengths: "
            f"{lengths.tolist()}. Give targets as [rows, labels]"
        )
    order = mask.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
    return targets.long().gather(1, order)


def _run(log_probs: Tensor, targets: Tensor, mask: Tensor | None, *options: Any) -> Tensor:
    labels = _labels(targets, mask, options[1])
    loss: Tensor = aten._ctc_loss.Tensor(log_probs, labels, *options)[0]
    return loss


def _run_backward(
    gradient: Tensor, log_probs: Tensor, targets: Tensor, mask: Tensor | None, *options: Any
) -> Tensor:
    labels = _labels(targets, mask, options[1])
    *lengths, blank, zero_infinity = options
    # computed again: the size of the second depends on values, so no program can keep it
    results = aten._ctc_loss.Tensor(log_probs, labels, *options)
    result: Tensor = aten._ctc_loss_backward.Tensor(
        gradient.contiguous(), log_probs, labels, *lengths, *results, blank, zero_infinity
    )
    return result.contiguous()


register(
    _LIBRARY,
    {"ctc_nll": (_run, _fake), "ctc_nll_backward": (_run_backward, _fake_backward)},
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tensors, ctx.options = inputs[:5], inputs[5:]
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    return ctc_nll_backward(gradient, *ctx.saved_tensors, *ctx.options), *(None,) * 6


torch.library.register_autograd("autopar::ctc_nll", _backward, setup_context=_keep, lib=_LIBRARY)
