import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.core.common.documents import parsed
from autopar.core.ir.placement import (
    OpStrategy,
    Partial,
    Placement,
    Replicate,
    Shard,
    Varying,
    chunk_rows,
    even_rows,
)

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


placements = st.one_of(
    st.just(Replicate()),
    st.just(Varying()),
    st.builds(Shard, st.integers(0, 9), st.integers(1, 99)),
    st.builds(Partial, st.sampled_from(["sum", "max"])),
)


@given(st.lists(placements), st.lists(placements, min_size=1), st.sampled_from(["", "experts"]))
def test_texts_are_read_back(
    operands: list[Placement], results: list[Placement], lowering: str
) -> None:
    assert [Placement.of(str(own)) for own in operands] == operands
    op_strategy = OpStrategy(tuple(operands), tuple(results), lowering)
    assert OpStrategy.of(str(op_strategy)) == op_strategy


@pytest.mark.parametrize(
    "text",
    ["", "R(0)", "S", "S()", "S(x)", "S(-1)", "S(0, x-2)", "P(mean)", "S(0", "T(0)", "R -> R"],
)
def test_other_texts_are_no_placements(text: str) -> None:
    with pytest.raises(ValueError, match="cannot be read as Placement"):
        parsed(Placement, text)
