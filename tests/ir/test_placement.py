import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.ir.placement import Partial, Replicate, Shard, Varying, chunk_rows, even_rows

sizes = st.integers(0, 40)
parts = st.integers(1, 9)


@given(sizes, parts)
def test_chunks_are_those_of_torch(rows: int, ranks: int) -> None:
    """DTensor cuts so too; ranks that torch.chunk leaves out have nothing."""
    chunks = [len(chunk) for chunk in torch.empty(rows).chunk(ranks)] if rows else []
    assert chunk_rows(rows, ranks) == (*chunks, *[0] * (ranks - len(chunks)))


@given(sizes, parts)
def test_even_pieces_are_those_of_tensor_split(rows: int, ranks: int) -> None:
    assert even_rows(rows, ranks) == tuple(map(len, torch.empty(rows).tensor_split(ranks)))


def test_placements_are_values_that_print_short() -> None:
    placements = (
        Replicate(),
        Shard(0),
        Shard(1, interleave=3),
        Partial(),
        Partial("max"),
        Varying(),
    )
    assert " ".join(map(str, placements)) == "R S(0) S(1, x3) P(sum) P(max) V"
    assert len({*placements, Shard(0), Partial("sum")}) == len(placements)
    with pytest.raises(AttributeError):
        Shard(0).dim = 1  # type: ignore[misc]
