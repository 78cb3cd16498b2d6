"""Until when a search goes on."""

import time
from unittest.mock import patch

from autopar.planner.problem import Deadline


def test_a_part_ends_no_later_than_the_whole() -> None:
    with patch("time.monotonic", lambda: 109.0):
        whole = Deadline(10.0, 100.0)
        part = whole.part(0.5)
        assert whole()
        assert part()
        assert part == Deadline(1.0, 109.0)
        assert Deadline(10.0).part(0.2) == Deadline(2.0, 109.0)


def test_what_is_over_is_over_for_its_parts() -> None:
    whole = Deadline(1.0, time.monotonic() - 2.0)
    assert not whole()
    assert not whole.part(0.5)()


def test_there_need_not_be_any() -> None:
    assert Deadline(None)()
    assert Deadline(None).part(0.1)()
