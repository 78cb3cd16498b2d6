"""A record has the same length for every event, however many entries it has."""

import pytest

from autopar.common.row_exchange import RECORD_NUMBERS
from autopar.runtime.agreement.record import MAX_ENTRIES, Entry, encode


@pytest.mark.parametrize("count", [0, 1, MAX_ENTRIES])
def test_records_have_one_length(count: int) -> None:
    entries = [Entry(f"entry {place}", place) for place in range(count)]
    assert len(encode("calls a model", entries, 0, [])) == RECORD_NUMBERS


def test_a_longer_record_is_refused() -> None:
    entries = [Entry("entry", 0)] * (MAX_ENTRIES + 1)
    with pytest.raises(ValueError, match="entries in a record"):
        encode("calls a model", entries, 0, [])
