"""How each operator that reduces over the rows of the batch is made global.

A rule is called on a node that has rows in and none out. It writes what makes the value that of
the global batch, weights the gradient that enters the operator's backward, and returns True; or
returns False to decline. Sums need no weight: the gradient of a sum is the same for every row.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from autopar.graph import has_rows, tensors
from autopar.passes.accumulate_micro_batches import BATCH
from autopar.passes.build import aten
from autopar.passes.collectives import collective, start_all_gather
from autopar.placement import Partial, Replicate, Varying

if TYPE_CHECKING:
    from autopar.passes.synchronize_statistics import Typing

Rule = Callable[["Typing", fx.Node], bool]
R, V, P = Replicate(), Varying(), Partial()


def reduce_sum(work: Typing, node: fx.Node) -> bool:
    """A sum over rows: the sum of the ranks' sums."""
    work.type(node, V)
    users = list(node.users)
    work.fx.inserting_before(node.next)
    result = work.all_reduce([node], node)[0]
    for user in users:
        user.replace_input_with(node, result)
    return True


def reduce_mean(work: Typing, node: fx.Node) -> bool:
    """A mean over rows; its backward divides by the number of elements of the global batch."""
    work.type(node, V)
    work.whole.add(node.meta["seq_nr"])
    users = list(node.users)
    work.fx.inserting_before(node.next)
    result = work.mean(node)
    for user in users:
        user.replace_input_with(node, result)
    return True


def reduce_loss(work: Typing, node: fx.Node) -> bool:
    """A loss with reduction "mean" (1) or "sum" (2); some backwards divide by themselves."""
    if _argument(node, "reduction") == 2:
        return reduce_sum(work, node)
    name = node.target.overloadpacket.__name__ + "_backward"  # type: ignore[union-attr]
    entries = [n for n in _backward_of(node) if str(n.target).split(".")[1] == name]
    work.weighed_entries |= set(entries)
    return reduce_mean(work, node)


NLL_BACKWARD = (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)


def reduce_nll(work: Typing, node: fx.Node) -> bool:
    """Negative log likelihood: sum of losses over sum of weights, ignored targets left out."""
    if _argument(node, "reduction") == 2:
        loss, count = _getitem(work, node, 0), _getitem(work, node, 1)
        for item in (node, loss, count):
            work.type(item, V)
        if any(user.target not in NLL_BACKWARD for user in count.users):
            work.fx.inserting_before(max(loss, count).next)
            known = _count(work, node)
            if known is not count:
                count.replace_all_uses_with(known)
            reduce_sum(work, known)  # a lowering divides by it
        return reduce_sum(work, loss)
    arguments = list(node.args)
    arguments[3] = 2
    node.args = tuple(arguments)
    loss, count = _getitem(work, node, 0), _getitem(work, node, 1)
    for item in (node, loss, count):
        work.type(item, V)
    loss_users, count_users = list(loss.users), list(count.users)
    work.fx.inserting_before(max(loss, count).next)
    total, number = work.all_reduce([loss, _count(work, node)], node)
    mean = work.call(node, aten.div.Tensor, total, number)
    work.type(mean, R)
    for user in loss_users:
        user.replace_input_with(loss, mean)
    for user in count_users:
        user.replace_input_with(count, number)
    return True


def _count(work: Typing, node: fx.Node) -> fx.Node:
    """How many targets are not ignored, of the targets alone: known before any loss is.

    With a weight for each class, or where no schedule waits for it, the operator's own number.
    """
    if node.args[2] is not None or work.axis != BATCH:
        return _getitem(work, node, 1)
    target, ignored = node.args[1], node.args[4]
    counted = work.call(node, aten.ne.Scalar, target, ignored)
    dtype = tensors(_getitem(work, node, 1))[0].dtype
    return work.call(node, aten.sum.default, counted, dtype=dtype)


def contraction(work: Typing, node: fx.Node) -> bool:
    """A matrix product that sums over rows, as in statistics of a router."""
    if not all(has_rows(n) for n in node.all_input_nodes):
        return False
    return reduce_sum(work, node)


def reduce_spread(work: Typing, node: fx.Node) -> bool:
    """Variance and standard deviation over rows, about the mean of the global batch."""
    x, dims = node.args[0], _argument(node, "dim")
    correction, keep = _argument(node, "correction"), bool(_argument(node, "keepdim"))
    fake = tensors(x)[0]  # type: ignore[arg-type]
    dims = list(dims) if dims else list(range(fake.dim()))
    own = fake.numel() / max(1, tensors(node)[0].numel())
    work.type(node, V)
    work.whole.add(node.meta["seq_nr"])
    users = list(node.users)

    def op(target: Any, *args: Any) -> fx.Node:
        return work.call(node, target, *args)

    work.fx.inserting_before(node.next)
    count = op(aten.div.Tensor, own, work.weight)
    if fake.dtype != torch.float64:
        count = work.call(node, aten._to_copy.default, count, dtype=fake.dtype)
    (total,) = work.all_reduce([op(aten.sum.dim_IntList, x, dims, True)], node)
    off = op(aten.sub.Tensor, x, op(aten.div.Tensor, total, count))
    (square,) = work.all_reduce(
        [op(aten.sum.dim_IntList, op(aten.mul.Tensor, off, off), dims, keep)], node
    )
    result = op(
        aten.div.Tensor, square, op(aten.sub.Tensor, count, 1 if correction is None else correction)
    )
    if node.target is aten.std.correction:
        work.type(result, R)
        result = op(aten.sqrt.default, result)
    work.type(result, R)
    for user in users:
        user.replace_input_with(node, result)
    return True


RULES: Mapping[Any, Rule] = {
    aten.var.correction: reduce_spread,
    aten.std.correction: reduce_spread,
    aten.sum.default: reduce_sum,
    aten.sum.dim_IntList: reduce_sum,
    aten.mean.default: reduce_mean,
    aten.mean.dim: reduce_mean,
    aten.mm.default: contraction,
    aten.bmm.default: contraction,
    aten.dot.default: contraction,
    aten.mv.default: contraction,
    aten.mse_loss.default: reduce_loss,
    aten.smooth_l1_loss.default: reduce_loss,
    aten.huber_loss.default: reduce_loss,
    aten.binary_cross_entropy.default: reduce_loss,
    aten.binary_cross_entropy_with_logits.default: reduce_loss,
    aten.soft_margin_loss.default: reduce_loss,
    aten.nll_loss_forward.default: reduce_nll,
    aten.nll_loss2d_forward.default: reduce_nll,
}

SHAPE_ONLY = frozenset(
    {
        aten.new_zeros.default,
        aten.new_ones.default,
        aten.new_full.default,
        aten.new_empty.default,
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.full_like.default,
        aten.empty_like.default,
    }
)
"""Operators whose result does not depend on the values that they are given."""

JOINTLY_LINEAR = frozenset({aten.add.Tensor, aten.sub.Tensor, aten.cat.default, aten.stack.default})


def _along_rows(node: fx.Node) -> bool:
    """Whether the dims that an operator works along run over rows."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    dims = _argument(node, "dim" if _has_argument(node, "dim") else "dims")
    dims = dims if isinstance(dims, (list, tuple)) else [dims]
    size = max(tensors(source)[0].dim(), 1)
    rows = source.meta["rows"][0]
    return any(d % size in rows for d in dims) if dims else bool(rows)


def _cuts_rows(node: fx.Node) -> bool:
    return _along_rows(node) and any(
        tensors(node)[0].shape[d] != tensors(node.args[0])[0].shape[d]  # type: ignore[arg-type]
        for d in node.args[0].meta["rows"][0]  # type: ignore[union-attr]
    )


def _picks_rows(node: fx.Node) -> bool:
    source, indices = node.args[:2]
    rows = source.meta["rows"][0]  # type: ignore[union-attr]
    picked = [i for d, i in enumerate(indices) if d in rows and i is not None]  # type: ignore
    return any(i.target not in NUMBERS for i in picked)


def _joins_others(node: fx.Node) -> bool:
    dim = _argument(node, "dim") % tensors(node)[0].dim()
    parts = node.args[0]
    return dim in node.meta["rows"][0] and any(not p.meta["rows"][0] for p in parts)  # type: ignore


def _attends_rows(node: fx.Node) -> bool:
    key = node.args[1]
    return tensors(key)[0].dim() - 2 in key.meta["rows"][0]  # type: ignore[arg-type,union-attr]


def _is_no_index(node: fx.Node) -> bool:
    return any(
        user.target not in (aten.index.Tensor, aten.index_put.default) for user in node.users
    )


def _has_argument(node: fx.Node, name: str) -> bool:
    return any(a.name == name for a in node.target._schema.arguments)  # type: ignore[union-attr]


NUMBERS = (aten.arange.default, aten.arange.start, aten.arange.start_step)
MIXES = "mixes the rows of the batch"
PICKS = "picks rows of the batch"
MIXES_ROWS: Mapping[Any, tuple[Callable[[fx.Node], bool], str]] = {
    **dict.fromkeys(
        (
            aten._softmax.default,
            aten._log_softmax.default,
            aten.cumsum.default,
            aten.cumprod.default,
            aten.logcumsumexp.default,
            aten.flip.default,
            aten.roll.default,
            aten.sort.default,
            aten.sort.stable,
            aten.gather.default,
            aten.index_select.default,
        ),
        (_along_rows, MIXES),
    ),
    **dict.fromkeys(
        (
            aten._scaled_dot_product_flash_attention_for_cpu.default,
            aten._scaled_dot_product_flash_attention.default,
            aten._scaled_dot_product_efficient_attention.default,
            aten._scaled_dot_product_cudnn_attention.default,
        ),
        (_attends_rows, MIXES),
    ),
    **dict.fromkeys(
        (
            aten.slice.Tensor,
            aten.split.Tensor,
            aten.split_with_sizes.default,
            aten.topk.default,
        ),
        (_cuts_rows, PICKS),
    ),
    aten.index.Tensor: (_picks_rows, PICKS),
    aten.cat.default: (_joins_others, "joins rows of the batch with what every rank has"),
    **dict.fromkeys(NUMBERS, (_is_no_index, "numbers the rows of the batch")),
}


def mixes_rows(node: fx.Node) -> str:
    """How the rows of a result depend on more than their own row, "" if they do not."""
    rows = node.meta.get("rows") or ()
    if not any(rows) or node.op != "call_function":
        return ""
    inputs = [r for n in node.all_input_nodes for r in n.meta["rows"]]
    if any(len(r) > 1 for r in rows) and all(len(r) < 2 for r in inputs):
        return "pairs the rows of the batch"
    applies, what = MIXES_ROWS.get(node.target, (None, ""))
    return what if applies is not None and applies(node) else ""


def is_training_norm(node: fx.Node) -> bool:
    """Whether a node is a batch norm that takes its statistics from the batch."""
    functional = aten._native_batch_norm_legit_functional.default
    if node.target is functional:
        return bool(node.args[5])
    return node.target is aten._native_batch_norm_legit.no_stats


def synchronize_batch_norm(work: Typing, node: fx.Node) -> None:
    """Batch norm over the global batch: means and variances are gathered and combined (Chan)."""
    x, weight, bias, *rest = node.args
    stats = rest[:2] if node.target is aten._native_batch_norm_legit_functional.default else []
    momentum, eps = node.args[-2:]
    fake = tensors(x)[0]  # type: ignore[arg-type]
    channels, dims = fake.shape[1], [0, *range(2, fake.dim())]
    wide = torch.float64 if fake.dtype == torch.float64 else torch.float32

    def own(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return work.call(node, target, *args, **kwargs)

    def op(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        result = own(target, *args, **kwargs)
        work.type(result, R)
        return result

    work.fx.inserting_before(node)
    wide_x = x if fake.dtype == wide else own(aten._to_copy.default, x, dtype=wide)
    moments = own(aten.var_mean.correction, wide_x, dims, correction=0)
    variance, mean = (own(operator.getitem, moments, i) for i in (0, 1))
    share = own(aten._to_copy.default, work.weight, dtype=wide)
    sent = own(aten.cat.default, [mean, variance, own(aten.view.default, share, [1])])
    row = own(aten.view.default, sent, [1, 2 * channels + 1])
    ranks = work.graph.axes[work.axis]
    (table,) = collective(work.fx, node, start_all_gather, [row], [ranks], work.axis)
    for item in (table.args[0].args[0], table.args[0], table):  # type: ignore[union-attr]
        work.type(item, R)  # type: ignore[arg-type]
    means = op(aten.slice.Tensor, table, 1, 0, channels)
    variances = op(aten.slice.Tensor, table, 1, channels, 2 * channels)
    shares = op(aten.slice.Tensor, table, 1, 2 * channels, 2 * channels + 1)
    mean = op(aten.sum.dim_IntList, op(aten.mul.Tensor, means, shares), [0])
    off = op(aten.sub.Tensor, means, mean)
    spread = op(aten.add.Tensor, variances, op(aten.mul.Tensor, off, off))
    variance = op(aten.sum.dim_IntList, op(aten.mul.Tensor, spread, shares), [0])
    inverse = op(aten.rsqrt.default, op(aten.add.Tensor, variance, eps))
    normed = op(
        aten._native_batch_norm_legit_no_training.default,
        x, weight, bias, mean, variance, momentum, eps,
    )  # fmt: skip
    out = op(operator.getitem, normed, 0)
    work.type(normed, V)
    work.type(out, V)
    elements = op(aten.div.Tensor, float(fake.numel() // channels), work.weight)
    results: list[fx.Node | None] = [out, mean, inverse]
    if stats:
        unbiased = op(aten.div.Tensor, elements, op(aten.sub.Tensor, elements, 1.0))
        fair = op(aten.mul.Tensor, variance, op(aten._to_copy.default, unbiased, dtype=wide))
        pairs = zip(stats, (mean, fair), strict=True)
        results += [_running(op, old, new, momentum) for old, new in pairs]
    for item in list(node.users):
        replacement = results[item.args[1]]  # type: ignore[index]
        assert replacement is not None
        work.erase(item, replacement)
    out.meta["rows"], normed.meta["rows"] = ((0,),), ((0,), (), ())
    number = node.meta["seq_nr"]
    for back in [n for n in work.fx.nodes if n.target is aten.native_batch_norm_backward.default]:
        if back.meta["seq_nr"] == number and back.args[1] is x:
            _norm_backward(work, back, mean, variance, inverse, elements, wide)
    work.erase(node)


def _running(op: Callable[..., fx.Node], old: Any, new: fx.Node, momentum: Any) -> fx.Node:
    kept = op(aten.mul.Tensor, old, 1.0 - momentum)
    added = op(aten.mul.Tensor, new, momentum)
    if tensors(old)[0].dtype != tensors(new)[0].dtype:
        added = op(aten._to_copy.default, added, dtype=tensors(old)[0].dtype)
    return op(aten.add.Tensor, kept, added)


def _norm_backward(
    work: Typing, node: fx.Node, mean: fx.Node, variance: fx.Node, inverse: fx.Node,
    elements: fx.Node, wide: torch.dtype,
) -> None:  # fmt: skip
    """The backward given global statistics, less what flows through these.

    dx = w/s (dy - mean(dy) - xhat mean(dy xhat)), with s the deviation, means over the global
    batch, and xhat the normalised input (Ioffe & Szegedy 2015, appendix).
    """
    dy, x, weight, *_ = node.args
    fake = tensors(x)[0]  # type: ignore[arg-type]
    eps = node.args[8]
    shape = [1, -1] + [1] * (fake.dim() - 2)
    work.from_tangents.add(node)

    def op(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return work.call(node, target, *args, **kwargs)

    work.fx.inserting_before(node)
    frozen = op(
        aten.native_batch_norm_backward.default,
        dy, x, weight, mean, variance, mean, inverse, False, eps, [True, True, True],
    )  # fmt: skip
    direct, d_weight, d_bias = (op(operator.getitem, frozen, i) for i in range(3))
    sum_xhat, sum_dy = work.all_reduce([d_weight, d_bias], node)
    count = op(aten._to_copy.default, elements, dtype=wide)
    scale = inverse if weight is None else op(aten.mul.Tensor, inverse, weight)
    scale = op(aten.div.Tensor, scale, count)
    slope = op(aten.mul.Tensor, op(aten.mul.Tensor, scale, inverse), sum_xhat)
    offset = op(aten.mul.Tensor, scale, sum_dy)
    offset = op(aten.sub.Tensor, offset, op(aten.mul.Tensor, slope, mean))
    slope, offset = (op(aten.view.default, t, shape) for t in (slope, offset))
    through = op(aten.add.Tensor, op(aten.mul.Tensor, x, slope), offset)
    if tensors(through)[0].dtype != fake.dtype:
        through = op(aten._to_copy.default, through, dtype=fake.dtype)
    d_x = op(aten.sub.Tensor, direct, through)
    d_x.meta["rows"] = ((0,),)
    for item in (d_weight, d_bias):
        work.type(item, P)
    for item in list(node.users):
        work.erase(item, (d_x, d_weight, d_bias)[item.args[1]])  # type: ignore[index]
    work.erase(node)


def _backward_of(node: fx.Node) -> list[fx.Node]:
    """The backward of an operator; none if it is not differentiated.

    An operator that is not shares the number of the differentiated one before it. Sums of
    gradients bear arbitrary numbers.
    """
    number = node.meta["seq_nr"]
    alike = [n for n in node.graph.nodes if n.op == "call_function" and n.meta["seq_nr"] == number]
    if alike[0] is not node:
        return []
    return [n for n in alike if n.meta["phase"] == "backward" and n.target not in JOINTLY_LINEAR]


def _argument(node: fx.Node, name: str) -> Any:
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    for index, argument in enumerate(schema):
        if argument.name == name:
            given = node.args[index] if index < len(node.args) else node.kwargs.get(name)
            return argument.default_value if given is None else given
    return None


def _getitem(work: Typing, node: fx.Node, index: int) -> fx.Node:
    for user in node.users:
        if user.args[1] == index:
            return user
    work.fx.inserting_before(node.next)
    return work.call(node, operator.getitem, node, index)
