"""Until when planning goes on."""

import signal
from collections.abc import Callable

import pytest

from autopar.core.common.deadline import Deadline, TimeIsOver, arm, check_time, remaining_s


def clock(*times_s: float) -> Callable[[], float]:
    """A clock that shows each time once, and then the last."""
    left = list(times_s)
    return lambda: left.pop(0) if len(left) > 1 else left[0]


def test_a_part_ends_no_later_than_the_whole() -> None:
    whole = Deadline(10.0, 100.0, clock(109.0))
    assert whole()
    assert whole.part(0.5).left_s == 1.0
    assert Deadline(10.0, clock=clock(109.0)).part(0.2).left_s == 2.0
    over = Deadline(1.0, 100.0, clock(102.0))
    assert not over()
    assert not over.part(0.5)()


def test_there_need_not_be_any() -> None:
    assert Deadline(None)()
    assert Deadline(None).part(0.1)()


def test_time_ends_planning_once_there_is_an_answer() -> None:
    check_time()
    with Deadline(1.0, 0.0, clock(2.0)).enforced():
        check_time()
        assert remaining_s() > 1e9
        arm()
        assert remaining_s() == 0.0
        with pytest.raises(TimeIsOver):
            check_time()
    check_time()


def test_an_interruption_ends_planning() -> None:
    handler = signal.getsignal(signal.SIGINT)
    deadline = Deadline(None)
    with deadline.enforced():
        signal.raise_signal(signal.SIGINT)
        assert not deadline()
        with pytest.raises(TimeIsOver):
            check_time()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is handler
