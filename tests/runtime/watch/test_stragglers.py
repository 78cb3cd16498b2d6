"""A rank that computes slowly, and a link that sends slowly, are named on every rank."""

import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import distributed as dist

import autopar
from autopar.errors import StragglerWarning
from autopar.runtime.watch import collective_log, links, steps, stragglers
from autopar.runtime.watch.links import Probe
from autopar.runtime.watch.stragglers import LASTING, Lasting, Pace, slow_links, slow_ranks
from tests.harness.worlds import run

WINDOW = 4
SLEEP_S, WIRE_S = 0.2, 0.06  # far above what a busy machine adds to steps of a millisecond


def over_wire(send: Any, seconds: float) -> Any:
    """A send that arrives after so long, while the rank goes on."""
    pool = ThreadPoolExecutor()

    def later(*args: Any, **kwargs: Any) -> Any:
        def transfer() -> None:
            time.sleep(seconds)
            send(*args, **kwargs).wait()

        future = pool.submit(transfer)
        return SimpleNamespace(wait=future.result)

    return later


def train(rank: int, world_size: int, *, slow: str) -> list[str]:
    """Warnings, as errors, of training in which rank 1 is slow."""
    told, wait = [], collective_log._wait_tensor

    def wait_for_wire(tensor: Any) -> Any:
        time.sleep(WIRE_S)
        return wait(tensor)

    send = over_wire(dist.isend, SLEEP_S if rank == 1 else WIRE_S)
    with ExitStack() as stack:
        replace = [(steps, "WINDOW", WINDOW), (stragglers, "SPARING", 0.0), (links, "TRANSFERS", 2)]
        replace.append((links.socket, "gethostname", lambda: f"machine {rank}"))
        if slow == "link":
            replace += [(collective_log, "_wait_tensor", wait_for_wire), (dist, "isend", send)]
            replace.append((stragglers, "WAITING", 0.02))  # a busy machine adds to the work
        for where, name, value in replace:
            stack.enter_context(patch.object(where, name, value))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("error", StragglerWarning)
        model = autopar.compile(torch.nn.Linear(4, 2), strategy="ddp", fallback=False)
        for _ in range(WINDOW * (LASTING + 2)):
            if (slow, rank) == ("work", 1):
                time.sleep(SLEEP_S)
            try:
                model(torch.ones(6, 4)).square().mean().backward()
            except StragglerWarning as warning:
                told.append(str(warning))
    return told


@pytest.mark.slow
def test_slow_work_is_named_on_every_rank_once() -> None:
    answers = run(train, 3, slow="work")
    assert answers[0] == answers[1] == answers[2]
    (text,) = answers[0]
    assert text.startswith("rank 1 is slow in its own work: ")


@pytest.mark.slow
def test_a_slow_link_is_named_by_its_ends() -> None:
    answers = run(train, 3, slow="link")
    assert answers[0] == answers[1] == answers[2]
    (text,) = (text for text in answers[0] if "link" in text)
    ends = {part.partition(" is slow")[0] for part in text.split("; ")}
    assert ends == {"the link from rank 1 to rank 0", "the link from rank 1 to rank 2"}


def test_slow_ranks_have_more_work_by_the_step_and_by_the_row() -> None:
    def paces(*figures: tuple[float, int, int]) -> list[Pace]:
        return [Pace(s, s / rows, 0.0, 32 * s, stage) for s, rows, stage in figures]

    assert slow_ranks(paces((1.0, 2, 0), (1.1, 2, 0), (1.5, 2, 0))) == {2: 1.5 / 1.1}
    assert slow_ranks(paces((1.0, 2, 0), (1.3, 2, 0))) == {1: 1.3}
    assert slow_ranks(paces((1.5, 3, 0), (1.0, 2, 0), (1.0, 2, 0))) == {}  # has more rows
    assert slow_ranks(paces((1.0, 1, 0), (1.0, 4, 0), (1.0, 4, 0))) == {}  # was given fewer
    assert slow_ranks(paces((1.0, 2, 0), (2.0, 2, 1))) == {}  # another stage
    waiting = [pace._replace(waited_s=20.0) for pace in paces((1.0, 2, 0), (1.5, 2, 0))]
    assert slow_ranks(waiting) == {}  # hardly matters


def test_links_between_machines_are_compared() -> None:
    times = {(0, 1): 1.0, (1, 0): 3.0, (2, 3): 1.0, (3, 2): 1.0}
    times |= {(1, 2): 9.0, (2, 1): 9.0, (3, 0): 9.0, (0, 3): 30.0}
    assert slow_links(Probe(times, ["a", "a", "b", "b"], 1.0)) == {(0, 3): 30.0 / 9.0}
    assert slow_links(Probe(times, ["a"] * 4, 1.0)) == {}


def test_only_what_lasts_is_named_and_once() -> None:
    seen = Lasting[int]()
    rounds = [[2], [2], [], [2], [2, 0], [2, 0], [2, 0], [], [2], [2], [2]]
    assert [seen.saw(slow) for slow in rounds] == [[]] * 5 + [[2], [0]] + [[]] * 4
