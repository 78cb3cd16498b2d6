"""A hang: every rank that waits says where all ranks are."""

import contextlib
import datetime
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.runtime.watch.collective_log import LOG, MAX_WAITS
from autopar.runtime.watch.hang import Whereabouts
from tests.harness.worlds import Raised, run, run_isolated

TIMEOUT_S = 8.0


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu()).square().mean()


def hang(rank: int, world_size: int, *, stops: bool, folder: str) -> float:
    """Rank 2 hangs in its third step; returns how long the others waited, after their error."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT_S))
    pid = Path(folder, "pid")
    model = autopar.compile(Tiny(), strategy="zero3")
    begin = time.monotonic()
    try:
        for step in range(4):
            begin = time.monotonic()
            if (rank, step) == (2, 2):
                pid.write_text(str(os.getpid()))
                if stops:
                    os.kill(os.getpid(), signal.SIGSTOP)
                else:
                    time.sleep(TIMEOUT_S + 5.0)
                return 0.0
            model(torch.ones(6, 4)).backward()
    except autopar.CommunicationError as error:
        waited = time.monotonic() - begin
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            os.kill(int(pid.read_text()), signal.SIGCONT)
        assert waited < TIMEOUT_S + 5.0, waited
        raise error
    return 0.0


@pytest.mark.slow
@pytest.mark.parametrize("stops", [False, True])
def test_all_ranks_say_where_each_is(stops: bool, tmp_path: Path) -> None:
    answers = run_isolated(
        hang, 3, init=False, expect_errors=True, stops=stops, folder=str(tmp_path)
    )
    for rank, other in ((0, 1), (1, 0)):
        answer = answers[rank]
        assert isinstance(answer, Raised)
        assert answer.type == "CommunicationError"
        text = answer.message
        assert f"rank {rank} waits in the records of all ranks (it calls Tiny)" in text
        assert f"rank {other} waits in the records" in text
        assert "rank(s) [2] did not come" in text
        if stops:
            assert "rank(s) [2] do not answer" in text
        else:
            assert "rank 2 is at " in text
            assert "test_hang.py:" in text
            assert "in hang, " in text  # the function that sleeps


def log_of_steps(rank: int, world_size: int) -> list[str]:
    model = autopar.compile(Tiny(), strategy="zero3", example_inputs=(torch.ones(6, 4),))
    LOG.waits.clear()
    model(torch.ones(6, 4)).backward()
    assert all(wait.start <= wait.end for wait in LOG.waits)
    names = [wait.what for wait in LOG.waits]
    for _ in range(MAX_WAITS // 2):  # each step waits twice or more
        model(torch.ones(6, 4)).backward()
    assert len(LOG.waits) == MAX_WAITS
    return names


def test_the_log_names_collectives_axes_and_lines() -> None:
    names = run(log_of_steps, 2)[0]
    assert "the records of all ranks (it calls Tiny)" in names
    assert any(n.startswith("all_to_all_single over dp, test_hang.py:") for n in names), names


def test_a_rank_says_what_it_does_while_others_wait() -> None:
    with LOG.working("plans"):
        assert "plans (0 s so far)" in str(Whereabouts.here())
    assert "plans" not in str(Whereabouts.here())
