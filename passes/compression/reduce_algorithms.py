"""Algorithms for compressed sums of buckets.

All algorithms sum in the gradients' precision, float32 at least. All ranks get the same result,
because each rank decodes its own message too.

Error feedback adds the encoding error to the next message of the rank that made it (Seide et al.,
1-Bit Stochastic Gradient Descent, 2014). State keeps its old value if the sum is not finite, since
the optimizer skips such a step.

| algorithm | methods | all-reduce | reduce-scatter |
|---|---|---|---|
| `AllToAllReduce` | casts, int8, sign | all-to-all, then all-gather of sums | all-to-all |
| `AllGatherReduce` | top-k, threshold | all-gather | all-to-all |
| `RandomKReduce` | random-k | all-reduce of random columns | reduce-scatter of random columns |
| `LowRankReduce` | PowerSGD | two all-reduces of factors | the same, then own rows |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, fx

from autopar.core.ir.placement import chunk_of, chunk_rows
from autopar.core.ir.roles import State
from autopar.core.plan.compression import Compression
from autopar.passes.compression.codecs import Codec, codec, random_places
from autopar.passes.compression.compressed_reduce import CompressedReduce
from autopar.passes.core.collective_ops import (
    start_all_gather,
    start_all_reduce,
    start_all_to_all,
    start_reduce_scatter,
)


class AllToAllReduce(CompressedReduce):
    """Each rank sums the messages for its chunk, then sends the encoded sum to all ranks."""

    def fit(self, width: int) -> int:
        return codec(self.compression).fit(width)

    def write(self) -> list[fx.Node]:
        codec_, width, wide = codec(self.compression), self.width, self.wide
        gathers = not (self.splits or self.scatters)
        residuals = self.residuals(range(len(self.names)))
        table = self.begin(residuals)
        message = self.inline(codec_.encode, table)
        if gathers:
            done, (came,) = self.send(start_all_gather, [message], [self.senders])
        else:
            done, (came,) = self.send(start_all_to_all, [message])
        left = self.beside(done, codec_.lost, table, message) if residuals else None
        if gathers:
            whole = self.inline(self._totals, codec_, self.share(came))
            return self.end(whole, left, residuals)
        whole = self.inline(codec_.total, came, width, wide)
        if not self.scatters:
            own = whole
            again = self.inline(lambda own: codec_.encode(own.unsqueeze(0)), own)
            done, (came,) = self.send(start_all_gather, [again], [self.senders])
            if left is not None:
                left = self.beside(done, self._owned, codec_, left, own, again)
            whole = self.inline(codec_.decode, self.share(came), width, wide)
        return self.end(whole, left, residuals)

    def _owned(self, codec_: Codec, left: Tensor, own: Tensor, again: Tensor) -> Tensor:
        """Adds the error of encoding this rank's sum to its row of `left`."""
        mine = left[self.place] + codec_.lost(own.unsqueeze(0), again)
        return torch.cat([left[: self.place], mine, left[self.place + 1 :]])

    def _totals(self, codec_: Codec, messages: Tensor) -> Tensor:
        """Sums the senders' messages for each neighbour's part."""
        parts = messages.unflatten(0, (self.neighbours, self.senders))
        return torch.stack([codec_.total(own, self.width, self.wide) for own in parts.unbind()])


class AllGatherReduce(AllToAllReduce):
    """Each rank sums the messages of all ranks; a reduce-scatter uses an all-to-all."""

    splits = False


class RandomKReduce(CompressedReduce):
    """All ranks send the same random columns, new ones at every step.

    Without error feedback the sums are scaled to be unbiased.
    """

    splits = False

    def write(self) -> list[fx.Node]:
        residuals = self.residuals(range(len(self.names)))
        count = self.state("count", self.names[0], (), torch.int64)
        table = self.begin(residuals)
        draw = partial(random_places, width=self.width, density=self.compression.density)
        places = self.inline(draw, count)
        values = self.inline(lambda table, places: table.index_select(1, places), table, places)
        if self.scatters:
            done, (sums,) = self.send(start_reduce_scatter, [values], [1])
        else:
            done, (sums,) = self.send(start_all_reduce, [values])
        left = None
        if residuals:
            left = self.beside(done, lambda x, at: x.index_fill(1, at, 0.0), table, places)
        whole = self.inline(self._spread, sums if self.scatters else self.share(sums), places)
        after = self.inline(lambda count: count.copy_(count + 1), count)
        self.update("count", self.names[:1], [after])
        return self.end(whole, left, residuals)

    def _spread(self, sums: Tensor, places: Tensor) -> Tensor:
        # With feedback, columns that were left out come with later messages: scaling would count
        # them twice.
        scale = 1.0 if self.compression.feeds_back else self.width / places.numel()
        rows = sums.new_zeros((sums.shape[0], self.width)).index_copy(1, places, sums * scale)
        return rows.view(-1)


class LowRankReduce(CompressedReduce):
    """PowerSGD (Vogels et al., 2019): matrices sent as products of two narrow ones.

    Vectors, and matrices that would not become smaller, are sent uncompressed.
    """

    def write(self) -> list[fx.Node]:
        rank = self.compression.rank
        every = range(len(self.shapes))
        narrow = [i for i in every if pays(self.shapes[i], rank)]
        plain = [i for i in every if i not in narrow]
        found: dict[int, fx.Node] = {}
        if plain:
            found |= zip(plain, self._as_they_are(plain), strict=True)
        if narrow:
            found |= zip(narrow, self._as_products(narrow), strict=True)
        return [found[i] for i in every]

    def _as_they_are(self, which: Sequence[int]) -> list[fx.Node]:
        given = [self.operands[i] for i in which]
        if self.scatters:
            rows = [chunk_of(self.shapes[i][0], self.ranks, self.rank)[1] for i in which]
            return self.send(start_reduce_scatter, given, rows)[1]
        return self.send(start_all_reduce, given)[1]

    def _as_products(self, which: Sequence[int]) -> list[fx.Node]:
        rank, names = self.compression.rank, [self.names[i] for i in which]
        residuals = self.residuals(which)
        factors = [
            self.state("factor", self.names[i], (math.prod(self.shapes[i][1:]), rank), self.wide)
            for i in which
        ]
        matrices = self.inline(self._matrices, [self.operands[i] for i in which], residuals)
        lefts = self.inline(_each, lambda m, factor: m @ factor, matrices, factors)
        _, lefts = self.send(start_all_reduce, lefts)
        # All ranks factor the same sum, so they share a basis without sending one. The right
        # factors depend on it, so the two sums cannot be one collective.
        lefts = self.inline(_each, lambda left: torch.linalg.qr(left).Q, lefts)
        rights = self.inline(_each, lambda m, basis: m.T @ basis, matrices, lefts)
        done, sums = self.send(start_all_reduce, rights)
        if residuals:
            rest = partial(_each, lambda m, left, right: m - left @ right.T)
            lost = self.beside(done, rest, matrices, lefts, rights)
            self.update("residual", names, self.inline(_each, _settle, lost, sums, residuals))
        self.update("factor", names, self.inline(_each, _settle, sums, sums, factors))
        return list(self.inline(self._rows_of_products, which, lefts, sums))

    def _matrices(self, given: Sequence[Tensor], residuals: Sequence[Tensor]) -> list[Tensor]:
        wide = [tensor.to(self.wide) for tensor in given]
        if residuals:
            wide = [tensor + left for tensor, left in zip(wide, residuals, strict=True)]
        return [tensor.reshape(tensor.shape[0], -1) for tensor in wide]

    def _rows_of_products(
        self, which: Sequence[int], lefts: Sequence[Tensor], rights: Sequence[Tensor]
    ) -> list[Tensor]:
        found = []
        for i, left, right in zip(which, lefts, rights, strict=True):
            shape = self.shapes[i]
            if self.scatters:
                counts = chunk_rows(shape[0], self.ranks)
                first = sum(counts[: self.rank])
                left = left[first : first + counts[self.rank]]
            found.append((left @ right.T).view(-1, *shape[1:]).to(self.dtype))
        return found


def kept_of(
    compression: Compression, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> Iterator[tuple[State, Tensor]]:
    """State of a bucket that is kept between steps, as tensors on the meta device.

    Gradients have `shapes` by parameter name, and residuals and factors have `dtype`.
    """
    empty = partial(torch.empty, dtype=dtype, device="meta")
    low_rank = compression.method == "powersgd"
    for name, shape in shapes.items():
        if low_rank and not pays(shape, compression.rank):
            continue
        if compression.feeds_back:
            yield State("residual", name), empty(shape)
        if low_rank:
            yield State("factor", name), empty((math.prod(shape[1:]), compression.rank))
    if compression.method == "randomk":
        count = torch.empty((), dtype=torch.int64, device="meta")
        yield State("count", next(iter(shapes))), count


def pays(shape: Sequence[int], rank: int) -> bool:
    """Whether two factors of `rank` are smaller than a matrix of this shape."""
    if len(shape) < 2 or 0 in shape:
        return False
    rows, columns = shape[0], math.prod(shape[1:])
    return (rows + columns) * rank < rows * columns


def messages_of_sum(
    compression: Compression, count: int, ranks: int
) -> tuple[tuple[str, int], ...]:
    """Collectives of a compressed all-reduce of `count` float32 elements, and their bytes.

    PowerSGD is not supported, since its messages depend on the shapes.
    """
    if compression.method == "randomk":
        places = math.ceil(count / max(1, round(1 / compression.density)))
        return (("all_reduce", 4 * places),)
    codec_ = codec(compression)
    parts = ranks if REDUCE_ALGORITHMS[compression.method].splits else 1
    width = codec_.fit(math.ceil(count / parts))
    message = codec_.encode(torch.empty((1, width), device="meta"))
    nbytes = message.numel() * message.element_size()
    if parts == 1:
        return (("all_gather", ranks * nbytes),)
    return (("all_to_all", ranks * nbytes), ("all_gather", ranks * nbytes))


REDUCE_ALGORITHMS: dict[str, type[CompressedReduce]] = {
    "bf16": AllToAllReduce,
    "fp16": AllToAllReduce,
    "int8": AllToAllReduce,
    "sign": AllToAllReduce,
    "topk": AllGatherReduce,
    "threshold": AllGatherReduce,
    "randomk": RandomKReduce,
    "powersgd": LowRankReduce,
}


def _each(function: Callable[..., Tensor], *columns: Sequence[Tensor]) -> list[Tensor]:
    return [function(*row) for row in zip(*columns, strict=True)]


def _settle(new: Tensor, result: Tensor, old: Tensor) -> Tensor:
    return old.copy_(torch.where(result.sum().isfinite(), new.view_as(old), old))
