"""Random calls of pointwise operators, contractions and reductions."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from tests.passes.rules.samples.draw import Draw, sample

aten = torch.ops.aten

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
    aten.floor_divide.default,
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


@sample(aten._scaled_mm.default)
def scaled_mm(d: Draw) -> tuple[Any, ...]:
    m, k, n = d.size(), 16 * d.size(), 16 * d.size()
    a, b = d.rand(m, k).to(torch.float8_e4m3fn), d.rand(n, k).to(torch.float8_e4m3fn).t()
    by_row = d.flag()
    scales = (d.rand(m, 1), d.rand(1, n)) if by_row else (d.rand(), d.rand())
    bias = d.rand(n).float() if d.flag() else None
    return (a, b, *(scale.float() for scale in scales), bias, None, torch.float32)


@sample(aten.dot.default)
def dot(d: Draw) -> tuple[Any, ...]:
    k = d.size()
    return (d.rand(k), d.rand(k))


# -- reductions --------------------------------------------------------------------------------


@sample(aten.sum.default, aten.mean.default, aten.max.default, aten.min.default)
def everything(d: Draw) -> tuple[Any, ...]:
    return (d.rand(*d.sizes()),)


@sample(aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default)
def some_dims(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes()
    dims = sorted({d.below(len(shape)) % len(shape) for _ in range(2)})
    return (d.rand(*shape), dims, d.flag())


@sample(aten.histc.default)
def counts(d: Draw) -> tuple[Any, ...]:
    return (d.rand(*d.sizes()), 4, *((0, 1) if d.flag() else ()))


@sample(aten.logsumexp.default)
def logsumexp(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes()
    return (d.rand(*shape), [d.below(len(shape))], d.flag())


@sample(aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim)
def extremum(d: Draw) -> tuple[Any, ...]:
    """Arguments with many equal numbers, of which the first counts."""
    shape = d.sizes()
    return (d.randint(3, *shape).to(d.dtype), d.below(len(shape)), d.flag())


@sample(aten.prod.dim_int, aten.any.dim, aten.all.dim)
def one_dim(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes()
    return (d.rand(*shape), d.below(len(shape)), d.flag())


@sample(aten.var.correction, aten.var_mean.correction, aten.std.correction)
def variance(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes()
    return (d.rand(*shape), [d.below(len(shape))])


@sample(aten.linalg_vector_norm.default)
def vector_norm(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes()
    return (d.rand(*shape), 2, [d.below(len(shape))], d.flag())
