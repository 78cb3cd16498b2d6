"""Two threads in compiled models: the second one gets an error, on every rank."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import ThreadError
from autopar.runtime.agreement.turn import Turn
from tests.harness.worlds import run


def in_thread(work: Callable[[], Any]) -> BaseException | None:
    """The error of some work in a thread of its own, None without one."""
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded, name="second")
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    return errors[0] if errors else None


def test_a_second_thread_is_refused_and_the_first_may_come_again() -> None:
    turn = Turn()
    with turn, turn:
        error = in_thread(turn.__enter__)
    assert isinstance(error, ThreadError)
    assert "thread 'second' uses a compiled model while another thread is in a call" in str(error)

    def later() -> None:
        with turn:
            pass

    assert in_thread(later) is None


class Loss(nn.Module):
    """A layer and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).sum()


def called_in_two_threads(rank: int, world_size: int, models: int) -> list[str]:
    """Errors of a second thread: during a call, of the same and of another model, and after it."""
    x, seen = torch.ones(4, 4), list[str]()
    used = [autopar.compile(Loss(), strategy="ddp") for _ in range(models)]
    for model in used:
        model(x).backward()

    def meanwhile(*_: Any) -> None:
        seen.extend(type(in_thread(partial(model, x))).__name__ for model in used)

    used[0]._execution.check_first_call = meanwhile  # runs inside the call
    used[0](x).backward()
    seen.append(type(in_thread(lambda: used[-1](x).backward())).__name__)
    return seen


def test_a_second_thread_in_one_process() -> None:
    assert called_in_two_threads(0, 1, models=1) == ["ThreadError", "NoneType"]


@pytest.mark.slow
def test_a_second_thread_of_each_rank() -> None:
    seen = ["ThreadError", "ThreadError", "NoneType"]
    assert run(called_in_two_threads, 2, models=2) == [seen, seen]
