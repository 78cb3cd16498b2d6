"""Random calls of every operator that has a rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from autopar.passes.rules.loops import Operator
from autopar.passes.rules.oracle import results_of

aten = torch.ops.aten
SIZES = (1, 2, 3, 4, 6, 12)


class Draw:
    """What a sample is drawn with."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.generator = torch.Generator().manual_seed(0)
        self.dtype = data.draw(st.sampled_from([torch.float64, torch.float32]), "dtype")

    def size(self) -> int:
        """A size that 2 and 3 ranks often divide."""
        return self.data.draw(st.sampled_from(SIZES))

    def sizes(self, low: int = 1, high: int = 4) -> list[int]:
        """A shape."""
        return [self.size() for _ in range(self.data.draw(st.integers(low, high)))]

    def below(self, count: int) -> int:
        """A dim of `count`, from the front or the back."""
        return self.data.draw(st.integers(-count, count - 1))

    def flag(self) -> bool:
        """Yes or no."""
        return self.data.draw(st.booleans())

    def rand(self, *shape: int) -> Tensor:
        """Numbers from 0.1 to 1.1."""
        made = torch.rand(shape, dtype=torch.float64, generator=self.generator) + 0.1
        return made.to(self.dtype)

    def randint(self, high: int, *shape: int) -> Tensor:
        """Integers below `high`."""
        return torch.randint(0, high, shape, generator=self.generator)


Sample = Callable[[Draw], tuple[Any, ...]]
SAMPLES: dict[Any, Sample] = {}


def sample(*targets: Any) -> Callable[[Sample], Sample]:
    """Register how the arguments of some operators are drawn."""

    def register(function: Sample) -> Sample:
        SAMPLES.update(dict.fromkeys(targets, function))
        return function

    return register


def draw_operator(target: Any, data: st.DataObject) -> Operator:
    """A call of an operator."""
    *args, last = SAMPLES[target](Draw(data))
    args, kwargs = (args, last) if isinstance(last, dict) else ([*args, last], {})
    made = Operator(target, tuple(args), kwargs, ())
    return Operator(target, made.args, kwargs, results_of(made))


# -- pointwise ---------------------------------------------------------------------------------

ONE = (
    aten.neg, aten.abs, aten.exp, aten.log, aten.sin, aten.cos, aten.tanh, aten.sqrt, aten.rsqrt,
    aten.relu, aten.sigmoid, aten.silu, aten.gelu, aten.reciprocal, aten.floor, aten.clone,
    aten.detach, aten.alias, aten.zeros_like, aten.ones_like, aten.erf, aten.logical_not,
    aten.lift_fresh_copy, aten.expm1, aten.log1p, aten.sign, aten.ceil, aten.round, aten.isnan,
)  # fmt: skip
TWO = (
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.maximum.default,
    aten.minimum.default, aten.eq.Tensor, aten.ne.Tensor, aten.lt.Tensor, aten.le.Tensor,
    aten.gt.Tensor, aten.ge.Tensor, aten.pow.Tensor_Tensor, aten.atan2.default,
)  # fmt: skip
SCALAR = (
    aten.add.Scalar, aten.mul.Scalar, aten.div.Scalar, aten.pow.Tensor_Scalar, aten.eq.Scalar,
    aten.ne.Scalar, aten.lt.Scalar, aten.gt.Scalar, aten.ge.Scalar, aten.le.Scalar,
    aten.rsub.Scalar, aten.fmod.Scalar, aten.leaky_relu.default, aten.full_like.default,
    aten.clamp_min.default,
)  # fmt: skip
BACKWARD = (aten.tanh_backward, aten.gelu_backward, aten.silu_backward, aten.sigmoid_backward)


@sample(*(packet.default for packet in ONE))
def one(d: Draw) -> tuple[Any, ...]:
    return (d.rand(*d.sizes()),)


@sample(*TWO)
def two(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes()
    other = [1 if d.flag() and d.flag() else size for size in shape][d.below(len(shape)) :]
    return (d.rand(*shape), d.rand(*other)) if d.flag() else (d.rand(*other), d.rand(*shape))


@sample(*SCALAR)
def scalar(d: Draw) -> tuple[Any, ...]:
    return (d.rand(*d.sizes()), 0.5)


@sample(*(packet.default for packet in BACKWARD))
def backward(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes()
    return (d.rand(*shape), d.rand(*shape))


@sample(aten.threshold_backward.default)
def threshold_backward(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes()
    return (d.rand(*shape), d.rand(*shape) - 0.5, 0)


@sample(aten.where.self)
def where(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes()
    return (d.rand(*shape) > 0.5, d.rand(*shape), d.rand(*(shape if d.flag() else [])))


@sample(aten.fill.Scalar)
def fill(d: Draw) -> tuple[Any, ...]:
    return (d.rand(*d.sizes()), 2.5)


@sample(aten.fill.Tensor)
def fill_by(d: Draw) -> tuple[Any, ...]:
    return (d.rand(*d.sizes()), d.rand())


@sample(aten.softplus_backward.default)
def softplus_backward(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes()
    return (d.rand(*shape), d.rand(*shape), 1.0, 20.0)


@sample(aten.copy.default)
def copy(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes()
    return (d.rand(*shape), d.rand(*shape[d.below(len(shape)) :]))


@sample(aten.masked_fill.Scalar)
def masked_fill(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes()
    return (d.rand(*shape), d.rand(*shape[d.below(len(shape)) :]) > 0.5, 0.0)


@sample(aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.logical_and.default)
def masks(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes()
    return (d.rand(*shape) > 0.5, d.rand(*shape[d.below(len(shape)) :]) > 0.5)


@sample(aten.bitwise_not.default)
def one_mask(d: Draw) -> tuple[Any, ...]:
    return (d.rand(*d.sizes()) > 0.5,)


@sample(aten.addcmul.default, aten.addcdiv.default, aten.lerp.Tensor)
def three(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes()
    return tuple(d.rand(*shape) for _ in range(3))


# -- contractions ------------------------------------------------------------------------------


@sample(aten.mm.default)
def mm(d: Draw) -> tuple[Any, ...]:
    m, k, n = d.size(), d.size(), d.size()
    return (d.rand(m, k), d.rand(k, n))


@sample(aten.bmm.default)
def bmm(d: Draw) -> tuple[Any, ...]:
    b, m, k, n = d.size(), d.size(), d.size(), d.size()
    return (d.rand(b, m, k), d.rand(b, k, n))


@sample(aten.addmm.default)
def addmm(d: Draw) -> tuple[Any, ...]:
    m, k, n = d.size(), d.size(), d.size()
    bias = d.rand(n) if d.flag() else d.rand(m, n)
    return (bias, d.rand(m, k), d.rand(k, n))


@sample(aten.baddbmm.default)
def baddbmm(d: Draw) -> tuple[Any, ...]:
    b, m, k, n = d.size(), d.size(), d.size(), d.size()
    return (d.rand(1 if d.flag() else b, m, n), d.rand(b, m, k), d.rand(b, k, n))


@sample(aten.mv.default)
def mv(d: Draw) -> tuple[Any, ...]:
    m, k = d.size(), d.size()
    return (d.rand(m, k), d.rand(k))


@sample(aten._grouped_mm.default)
def grouped_mm(d: Draw) -> tuple[Any, ...]:
    groups, rows, m, k, n = 2, 8, 4 * d.size(), 4 * d.size(), 4 * d.size()
    ends = torch.tensor([2, rows], dtype=torch.int32)
    shapes = (((rows, k), (groups, k, n)), ((m, rows), (rows, n)), ((groups, m, k), (k, rows)))
    a, b = d.data.draw(st.sampled_from(shapes))
    return (d.rand(*a).float(), d.rand(*b).float(), ends)


@sample(aten.dot.default)
def dot(d: Draw) -> tuple[Any, ...]:
    k = d.size()
    return (d.rand(k), d.rand(k))


# -- reductions --------------------------------------------------------------------------------


@sample(aten.sum.default, aten.mean.default, aten.max.default)
def everything(d: Draw) -> tuple[Any, ...]:
    return (d.rand(*d.sizes()),)


@sample(aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default)
def some_dims(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes()
    dims = sorted({d.below(len(shape)) % len(shape) for _ in range(2)})
    return (d.rand(*shape), dims, d.flag())


@sample(aten.logsumexp.default)
def logsumexp(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes()
    return (d.rand(*shape), [d.below(len(shape))], d.flag())


@sample(aten.prod.dim_int, aten.max.dim, aten.argmax.default, aten.any.dim, aten.all.dim)
def one_dim(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes()
    return (d.rand(*shape), d.below(len(shape)), d.flag())


@sample(aten.var.correction, aten.var_mean.correction)
def variance(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes()
    return (d.rand(*shape), [d.below(len(shape))])


@sample(aten.linalg_vector_norm.default)
def vector_norm(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes()
    return (d.rand(*shape), 2, [d.below(len(shape))], d.flag())


# -- views -------------------------------------------------------------------------------------


@sample(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def view(d: Draw) -> tuple[Any, ...]:
    fine = d.sizes(1, 5)

    def merged() -> list[int]:
        shape: list[int] = []
        for size in fine:
            if shape and d.flag():
                shape[-1] *= size
            else:
                shape.append(size)
        return shape

    return (d.rand(*merged()), merged())


@sample(aten.permute.default)
def permute(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes()
    return (d.rand(*shape), d.data.draw(st.permutations(range(len(shape)))))


@sample(aten.transpose.int)
def transpose(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes()
    return (d.rand(*shape), d.below(len(shape)), d.below(len(shape)))


@sample(aten.t.default)
def t(d: Draw) -> tuple[Any, ...]:
    return (d.rand(*d.sizes(1, 2)),)


@sample(aten.unsqueeze.default)
def unsqueeze(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes()
    return (d.rand(*shape), d.below(len(shape) + 1))


@sample(aten.squeeze.default)
def squeeze(d: Draw) -> tuple[Any, ...]:
    return (d.rand(*d.sizes()),)


@sample(aten.squeeze.dim)
def squeeze_dim(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes()
    return (d.rand(*shape), d.below(len(shape)))


@sample(aten.squeeze.dims)
def squeeze_dims(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes(2, 4)
    return (d.rand(*shape), [0, len(shape) - 1])


@sample(aten.expand.default)
def expand(d: Draw) -> tuple[Any, ...]:
    result = d.sizes()
    source = [1 if d.flag() else size for size in result][d.below(len(result)) :]
    return (d.rand(*source), result)


@sample(aten.repeat.default)
def repeat(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes(1, 3)
    repeats = [1 + d.flag() for _ in range(len(shape) + d.flag())]
    return (d.rand(*shape), repeats)


@sample(aten.select.int)
def select(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes()
    dim = d.below(len(shape))
    return (d.rand(*shape), dim, d.below(shape[dim]))


@sample(aten.select_backward.default)
def select_backward(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes()
    dim = d.below(len(shape))
    rest = [s for i, s in enumerate(shape) if i != dim % len(shape)]
    return (d.rand(*rest), shape, dim, d.below(shape[dim]))


@sample(aten.slice.Tensor)
def slice_(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes()
    dim = d.below(len(shape))
    return (d.rand(*shape), dim, shape[dim] // 3, 2**62 if d.flag() else shape[dim], 1)


@sample(aten.slice_backward.default)
def slice_backward(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes()
    dim = d.below(len(shape))
    part = list(shape)
    start = shape[dim] // 3
    part[dim] -= start
    return (d.rand(*part), shape, dim, start, 2**62, 1)


@sample(aten.slice_scatter.default)
def slice_scatter(d: Draw) -> tuple[Any, ...]:
    part, shape, dim, start, *_ = slice_backward(d)
    return (d.rand(*shape), part, dim, start)


@sample(aten.select_scatter.default)
def select_scatter(d: Draw) -> tuple[Any, ...]:
    element, shape, dim, place = select_backward(d)
    return (d.rand(*shape), element, dim, place)


@sample(aten.stack.default)
def stack(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes(1, 3)
    return ([d.rand(*shape), d.rand(*shape)], d.below(len(shape) + 1))


@sample(aten.cat.default)
def cat(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes(1, 3)
    dim = d.below(len(shape))
    other = list(shape)
    other[dim] = d.size()
    return ([d.rand(*shape), d.rand(*other)], dim)


@sample(aten.unbind.int)
def unbind(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes()
    return (d.rand(*shape), d.below(len(shape)))


@sample(aten.split.Tensor)
def split(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes()
    return (d.rand(*shape), d.size(), d.below(len(shape)))


@sample(aten.split_with_sizes.default)
def split_with_sizes(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes()
    dim = d.below(len(shape))
    first = shape[dim] // 2
    return (d.rand(*shape), [first, shape[dim] - first], dim)


@sample(aten.constant_pad_nd.default)
def pad(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes()
    return (d.rand(*shape), [1, 2, 0, 0][: 2 * len(shape)], 0.5)


@sample(aten.flip.default)
def flip(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes()
    return (d.rand(*shape), [d.below(len(shape))])


@sample(aten.roll.default)
def roll(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes()
    return (d.rand(*shape), [1], [d.below(len(shape)) % len(shape)])


# -- a shape and a number ----------------------------------------------------------------------


@sample(aten.zeros.default, aten.ones.default)
def created(d: Draw) -> tuple[Any, ...]:
    return (d.sizes(),)


@sample(aten.full.default)
def full(d: Draw) -> tuple[Any, ...]:
    return (d.sizes(), 2.5)


@sample(aten.new_zeros.default, aten.new_ones.default)
def created_like(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes()
    return (d.rand(*shape), shape if d.flag() else d.sizes())


@sample(aten.new_full.default)
def full_like(d: Draw) -> tuple[Any, ...]:
    return (*created_like(d), 2.5)


# -- along a dim -------------------------------------------------------------------------------


@sample(aten._softmax.default, aten._log_softmax.default)
def softmax(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes()
    return (d.rand(*shape), d.below(len(shape)), False)


@sample(aten._safe_softmax.default, aten.cumsum.default, aten.cumprod.default)
def scan(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes()
    return (d.rand(*shape), d.below(len(shape)))


@sample(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def softmax_backward(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes()
    return (d.rand(*shape), d.rand(*shape), d.below(len(shape)), d.dtype)


@sample(aten.tril.default, aten.triu.default)
def triangle(d: Draw) -> tuple[Any, ...]:
    return (d.rand(*d.sizes(2, 4)),)


@sample(aten.sort.default)
def sort(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes()
    return (d.rand(*shape), d.below(len(shape)))


@sample(aten.sort.stable)
def stable_sort(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes()
    return (d.rand(*shape), {"stable": True, "dim": d.below(len(shape))})


@sample(aten.topk.default)
def topk(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes()
    dim = d.below(len(shape))
    return (d.rand(*shape), 1 + shape[dim] // 2, dim)


@sample(aten.gather.default)
def gather(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes()
    dim = d.below(len(shape))
    chosen = list(shape)
    chosen[dim] = d.size()
    return (d.rand(*shape), dim, d.randint(shape[dim], *chosen))


@sample(aten.scatter.src, aten.scatter_add.default)
def scatter(d: Draw) -> tuple[Any, ...]:
    target, dim, index = gather(d)
    count = target.shape[dim]
    index = torch.arange(count).view(
        [-1 if i == dim % target.dim() else 1 for i in range(target.dim())]
    )
    index = index.expand(target.shape)
    return (target, dim, index, d.rand(*index.shape))


@sample(aten.scatter.value)
def scatter_value(d: Draw) -> tuple[Any, ...]:
    target, dim, index = gather(d)
    return (target, dim, index, 2.0)


@sample(aten.index.Tensor)
def index(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes(2, 4)
    wide = [d.size() for _ in range(d.data.draw(st.integers(1, 2)))]
    first = d.data.draw(st.integers(0, len(shape) - 1))
    chosen = [None] * first + [d.randint(shape[first], *wide)]
    if first + 1 < len(shape) and d.flag():
        chosen.append(d.randint(shape[first + 1], wide[-1]))
    return (d.rand(*shape), chosen)


@sample(aten.index_put.default)
def index_put(d: Draw) -> tuple[Any, ...]:
    source, chosen = index(d)
    wanted = aten.index.Tensor(source, chosen).shape
    return (source, chosen, d.rand(*wanted), True)


@sample(aten.index_add.default)
def index_add(d: Draw) -> tuple[Any, ...]:
    target, dim, numbers = index_select(d)
    summands = list(target.shape)
    summands[dim] = len(numbers)
    return (target, dim, numbers, d.rand(*summands))


@sample(aten.index_select.default)
def index_select(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes()
    dim = d.below(len(shape))
    return (d.rand(*shape), dim, d.randint(shape[dim], d.size()))


# -- norms, losses, embedding ------------------------------------------------------------------


@sample(aten.native_layer_norm.default)
def layer_norm(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes(2, 4)
    weight = (d.rand(shape[-1]), d.rand(shape[-1])) if d.flag() else (None, None)
    return (d.rand(*shape), [shape[-1]], *weight, 1e-5)


@sample(aten.native_layer_norm_backward.default)
def layer_norm_backward(d: Draw) -> tuple[Any, ...]:
    source, normal, weight, bias, eps = layer_norm(d)
    _, mean, rstd = aten.native_layer_norm.default(source, normal, weight, bias, eps)
    mask = [True, weight is not None, bias is not None]
    return (d.rand(*source.shape), source, normal, mean, rstd, weight, bias, mask)


@sample(aten._fused_rms_norm.default)
def rms_norm(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes(2, 4)
    return (d.rand(*shape), [shape[-1]], d.rand(shape[-1]) if d.flag() else None, 1e-5)


@sample(aten.native_group_norm_backward.default)
def group_norm_backward(d: Draw) -> tuple[Any, ...]:
    source, weight, _, *sizes, groups, _ = group_norm(d)
    mean, rstd = (d.rand(source.shape[0], groups) for _ in range(2))
    mask = [True, True, True]
    return (d.rand(*source.shape), source, mean, rstd, weight, *sizes, groups, mask)


@sample(aten.native_group_norm.default)
def group_norm(d: Draw) -> tuple[Any, ...]:
    rows, groups, each, width = d.size(), 2, 3, d.size()
    channels = groups * each
    weights = (d.rand(channels), d.rand(channels))
    return (d.rand(rows, channels, width), *weights, rows, channels, width, groups, 1e-5)


@sample(aten._native_batch_norm_legit_functional.default)
def batch_norm(d: Draw) -> tuple[Any, ...]:
    rows, channels, width = d.size() + 1, d.size(), d.size()
    stats = [d.rand(channels) for _ in range(4)]
    return (d.rand(rows, channels, width, 2), *stats, True, 0.1, 1e-5)


@sample(aten.native_batch_norm_backward.default)
def batch_norm_backward(d: Draw) -> tuple[Any, ...]:
    rows, channels, width = d.size() + 1, d.size(), d.size()
    source = d.rand(rows, channels, width, 2)
    weight, mean, var, save_mean, save_rstd = (d.rand(channels) for _ in range(5))
    known = (weight, mean, var, save_mean, save_rstd)
    return (d.rand(*source.shape), source, *known, True, 1e-5, [True, True, True])


@sample(aten.nll_loss_forward.default)
def nll_loss(d: Draw) -> tuple[Any, ...]:
    rows, classes = d.size(), d.size()
    reduction = d.data.draw(st.sampled_from([0, 1, 2]))
    weights, ignored = (d.rand(classes) if d.flag() else None), (0 if d.flag() else -100)
    targets = d.randint(classes, rows)
    targets[0] = classes - 1  # of a mean something has to count
    return (d.rand(rows, classes), targets, weights, reduction, ignored if classes > 1 else -100)


@sample(aten.nll_loss_backward.default)
def nll_loss_backward(d: Draw) -> tuple[Any, ...]:
    source, targets, weights, reduction, ignored = nll_loss(d)
    gradient = d.rand(*targets.shape) if reduction == 0 else d.rand()
    total = torch.tensor(3.5, dtype=d.dtype)
    return (gradient, source, targets, weights, reduction, ignored, total)


@sample(aten.embedding.default)
def embedding(d: Draw) -> tuple[Any, ...]:
    entries = d.size()
    return (d.rand(entries, d.size()), d.randint(entries, *d.sizes(1, 3)))


@sample(aten.embedding_dense_backward.default)
def embedding_backward(d: Draw) -> tuple[Any, ...]:
    entries, shape = d.size(), d.sizes(1, 3)
    return (d.rand(*shape, d.size()), d.randint(entries, *shape), entries, -1, False)


# -- random numbers ----------------------------------------------------------------------------


@sample(aten.bernoulli.p, aten.uniform.default, aten.exponential.default)
def draw_like(d: Draw) -> tuple[Any, ...]:
    return (d.rand(*d.sizes()), 0.3)


@sample(aten.normal_functional.default, aten.rand_like.default, aten.randn_like.default)
def draw_like_plain(d: Draw) -> tuple[Any, ...]:
    return (d.rand(*d.sizes()),)


@sample(aten.randint_like.default)
def draw_integers_like(d: Draw) -> tuple[Any, ...]:
    return (d.rand(*d.sizes()), 7)


@sample(aten.randint_like.low_dtype)
def draw_integers_from_like(d: Draw) -> tuple[Any, ...]:
    return (d.rand(*d.sizes()), 3, 7)


@sample(aten.rand.default, aten.randn.default)
def draw_of_shape(d: Draw) -> tuple[Any, ...]:
    return (d.sizes(),)


@sample(aten.randint.default)
def draw_integers(d: Draw) -> tuple[Any, ...]:
    return (7, d.sizes())


@sample(aten.randint.low)
def draw_integers_from(d: Draw) -> tuple[Any, ...]:
    return (3, 7, d.sizes())


@sample(aten.normal.float_float)
def draw_normal(d: Draw) -> tuple[Any, ...]:
    return (1.0, 2.0, d.sizes())


@sample(aten.bernoulli.default, aten.poisson.default)
def draw_each(d: Draw) -> tuple[Any, ...]:
    return (d.rand(*d.sizes()) / 2,)


@sample(aten.native_dropout.default)
def dropout(d: Draw) -> tuple[Any, ...]:
    return (d.rand(*d.sizes()), 0.3, True)


# -- attention, convolution, pooling -----------------------------------------------------------


def _qkv(d: Draw) -> tuple[Any, ...]:
    batch, heads, queries, width = d.size(), d.size(), d.size(), 4
    keys = d.size()
    q = d.rand(batch, heads, queries, width)
    k, v = (d.rand(batch, heads, keys, width) for _ in range(2))
    mask = None
    if d.flag():
        mask = d.rand(*(1 if d.flag() else size for size in (batch, heads)), queries, keys)
    return q, k, v, mask, mask is None and d.flag()


FLASH = aten._scaled_dot_product_flash_attention_for_cpu


@sample(FLASH.default)
def attention(d: Draw) -> tuple[Any, ...]:
    q, k, v, mask, causal = _qkv(d)
    return (q, k, v, 0.0, causal, {} if mask is None else {"attn_mask": mask})


@sample(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def attention_backward(d: Draw) -> tuple[Any, ...]:
    q, k, v, _, causal = _qkv(d)
    out, statistics = FLASH.default(q, k, v, 0.0, causal)
    return (d.rand(*out.shape), q, k, v, out, statistics, 0.0, causal)


@sample(aten.convolution.default)
def convolution(d: Draw) -> tuple[Any, ...]:
    rows, into, out = d.size(), d.size(), d.size()
    transposed, groups = d.flag(), d.size()
    weight = (into * groups, out) if transposed else (out * groups, into)
    bias = d.rand(out * groups) if d.flag() else None
    rest = ([1, 1], [1, 1], [1, 1], transposed, [0, 0], groups)
    return (d.rand(rows, into * groups, 5, 5), d.rand(*weight, 3, 3), bias, *rest)


@sample(aten.convolution_backward.default)
def convolution_backward(d: Draw) -> tuple[Any, ...]:
    source, weight, bias, *rest = convolution(d)
    out = aten.convolution.default(source, weight, bias, *rest)
    sizes, mask = [out.shape[1]], [True, True, bias is not None]
    return (d.rand(*out.shape), source, weight, sizes, *rest, mask)


@sample(aten.max_pool2d_with_indices.default, aten.avg_pool2d.default)
def pooling(d: Draw) -> tuple[Any, ...]:
    return (d.rand(d.size(), d.size(), 6, 6), [2, 2])


@sample(aten.max_pool2d_with_indices_backward.default)
def max_pooling_backward(d: Draw) -> tuple[Any, ...]:
    source, size = pooling(d)
    out, places = aten.max_pool2d_with_indices.default(source, size)
    return (d.rand(*out.shape), source, size, [2, 2], [0, 0], [1, 1], False, places)


@sample(aten.avg_pool2d_backward.default)
def mean_pooling_backward(d: Draw) -> tuple[Any, ...]:
    source, size = pooling(d)
    return (d.rand(*source.shape[:2], 3, 3), source, size, [2, 2], [0, 0], False, True, None)


@sample(aten._adaptive_avg_pool2d_backward.default)
def adaptive_pooling_backward(d: Draw) -> tuple[Any, ...]:
    source, size = adaptive_pooling(d)
    return (d.rand(*source.shape[:2], *size), source)


@sample(aten.upsample_nearest2d.default)
def upsampled_nearest(d: Draw) -> tuple[Any, ...]:
    return (d.rand(d.size(), d.size(), 3, 2), [5, 4])


@sample(aten.upsample_bilinear2d.default, aten.upsample_bicubic2d.default)
def upsampled(d: Draw) -> tuple[Any, ...]:
    return (d.rand(d.size(), d.size(), 3, 2), [5, 4], False)


@sample(aten.upsample_nearest2d_backward.default)
def upsampled_nearest_backward(d: Draw) -> tuple[Any, ...]:
    rows, channels = d.size(), d.size()
    return (d.rand(rows, channels, 5, 4), [5, 4], [rows, channels, 3, 2])


@sample(aten.upsample_bilinear2d_backward.default, aten.upsample_bicubic2d_backward.default)
def upsampled_backward(d: Draw) -> tuple[Any, ...]:
    return (*upsampled_nearest_backward(d), False)


@sample(aten._adaptive_avg_pool2d.default)
def adaptive_pooling(d: Draw) -> tuple[Any, ...]:
    return (d.rand(d.size(), d.size(), 6, 6), [2, 3])
