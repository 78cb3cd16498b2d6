"""A record has the same length for every event, however many entries it has."""

import pytest

from autopar.core.common.row_exchange import RECORD_NUMBERS
from autopar.runtime.agreement.record import MAX_ENTRIES, Entry, describe_entry, encode


@pytest.mark.parametrize("count", [0, 1, MAX_ENTRIES])
def test_records_have_one_length(count: int) -> None:
    entries = [Entry(f"entry {place}", place) for place in range(count)]
    assert len(encode("calls a model", entries, 0, [])) == RECORD_NUMBERS


def test_a_longer_record_is_refused() -> None:
    entries = [Entry("entry", 0)] * (MAX_ENTRIES + 1)
    with pytest.raises(ValueError, match="entries in a record"):
        encode("calls a model", entries, 0, [])


@pytest.mark.parametrize(
    ("here", "there", "said"),
    [
        ({"x": "int64", "mask": "bool"}, {"x": "int64", "mask": "int64"}, "mask is bool on rank 1"),
        ({"x": "int64"}, {"x": "int64", "mask": "bool"}, "no mask on rank 1, mask is bool on"),
        ({"x": "int64", "mask": "bool"}, {"x": "int64"}, "mask is bool on rank 1, no mask on"),
        ({"y": "a", "x": "b"}, {"x": "b", "y": "a"}, "y, x on rank 1, x, y on rank 0"),
    ],
)
def test_the_item_that_differs_is_named(
    here: dict[str, str], there: dict[str, str], said: str
) -> None:
    entry = Entry("call with other arguments", there)
    assert said in describe_entry("calls a model", entry, {1: 0}, [there, here])
