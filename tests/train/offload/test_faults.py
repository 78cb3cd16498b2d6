"""Storage that fails for real: an error on every rank, nothing that hangs, no file that stays."""

import os
import resource
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from tests.harness.models import MODELS
from tests.harness.reference import batches
from tests.harness.training import ADAMW
from tests.harness.worlds import Raised, run_isolated
from tests.train.offload.test_parameters import ROWS, away, compiled, trained

pytestmark = pytest.mark.slow


def with_little_room(rank: int, world_size: int, folder: str, offload: str) -> None:
    if rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, resource.RLIM_INFINITY))
    make: Any = ADAMW
    if offload == "states":
        stored = {"folder": folder, "block_bytes": 1 << 14, **ADAMW.keywords}
        make, offload = partial(autopar.OffloadedOptimizer, torch.optim.AdamW, **stored), "none"
    trained("gpt", away(folder, zero=3, offload=offload), make)


@pytest.mark.slow
@pytest.mark.parametrize("offload", ["activations", "parameters", "states"])
def test_a_file_that_cannot_grow_on_one_rank(offload: str, tmp_path: Path) -> None:
    answers = run_isolated(
        with_little_room, 2, expect_errors=True, folder=str(tmp_path), offload=offload
    )
    assert all(isinstance(a, Raised) and a.type != "TimedOut" for a in answers), answers
    assert "File too large" in answers[1].message
    assert "more room" in answers[1].message


def killed_in_the_middle(rank: int, world_size: int, folder: str) -> None:
    model = compiled("gpt", away(folder, zero=3, offload="activations+parameters"))
    (args, _) = next(batches(MODELS["gpt"], [0], ROWS))
    loss = model(*args)
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    loss.backward()


@pytest.mark.slow
def test_a_rank_that_is_killed_leaves_no_file(tmp_path: Path) -> None:
    answers = run_isolated(killed_in_the_middle, 2, expect_errors=True, folder=str(tmp_path))
    assert answers[1] == Raised("Died", "exit code -9")
    assert isinstance(answers[0], Raised)
    assert answers[0].type != "TimedOut"
    assert not list(tmp_path.iterdir())


JOB = """
import sys
from tests.train.offload.test_parameters import away, trained
print(trained("gpt", away(sys.argv[1], offload="activations+parameters"))[0])
"""


@pytest.mark.slow
def test_two_jobs_share_a_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-c", JOB, str(tmp_path)]
    jobs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = [job.communicate(timeout=200)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0]
    assert printed[0] == printed[1]
    assert printed[0].strip() == str(trained("gpt", away(tmp_path, offload="none"))[0])
