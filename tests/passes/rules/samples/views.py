"""Random calls of views, of creation operators and of operators along a dim."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from tests.passes.rules.samples.draw import Draw, sample

aten = torch.ops.aten

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
    dims = [d.below(len(shape)) % len(shape)]
    return (d.rand(*shape), [1], dims if d.below(3) else [])


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


@sample(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes(2, 4)
    wide = [d.size() for _ in range(d.data.draw(st.integers(1, 2)))]
    first = d.data.draw(st.integers(0, len(shape) - 1))
    chosen = [None] * first + [d.randint(shape[first], *wide)]
    if first + 1 < len(shape) and d.flag():
        chosen.append(d.randint(shape[first + 1], wide[-1]))
    return (d.rand(*shape), chosen)


@sample(aten.index_put.default, aten._unsafe_index_put.default)
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
