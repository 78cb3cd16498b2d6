"""Waits that say what they wait for, and end."""

import threading
import time

import pytest

from autopar.core import waiting
from autopar.core.waiting import awaited


def test_a_wait_says_what_it_waits_for_and_ends_at_its_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waiting, "TELL_S", 0.1)
    said: list[str] = []
    left, start = iter("abcdefgh"), time.monotonic()
    with pytest.raises(TimeoutError, match=r"waited for rank . for 0 s"):
        awaited(threading.Event().wait, lambda: f"rank {next(left)}", 0.35, said.append)
    assert time.monotonic() - start < 2
    assert said[:2] == ["waits for rank a, for 0 s at most", "waits for rank b, for 0 s at most"]


def test_a_wait_gives_the_result_or_the_error_at_once() -> None:
    said: list[str] = []
    assert awaited(lambda: 3, str, 60, said.append) == 3
    with pytest.raises(TimeoutError, match="of the call itself"):
        awaited(_raise, str, 60, said.append)
    assert not said


def _raise() -> None:
    raise TimeoutError("of the call itself")
