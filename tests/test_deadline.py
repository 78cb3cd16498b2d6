"""Until when a search goes on."""

import time

from autopar.deadline import Deadline


def test_a_part_ends_no_later_than_the_whole() -> None:
    whole = Deadline(10.0, time.monotonic() - 9.0)
    part = whole.part(0.5)
    assert whole()
    assert part()
    assert part.limit_s is not None
    assert 0.9 < part.limit_s <= 1.0
    assert Deadline(10.0).part(0.2).limit_s == 2.0


def test_what_is_over_is_over_for_its_parts() -> None:
    whole = Deadline(1.0, time.monotonic() - 2.0)
    assert not whole()
    assert not whole.part(0.5)()


def test_there_need_not_be_any() -> None:
    assert Deadline(None)()
    assert Deadline(None).part(0.1)()
