"""Ranks that fail are started again; what the launcher says, keeps and returns."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# Ranks talk through the launcher's store alone: importing torch.distributed's groups takes seconds.
SCRIPT = """
import os, signal, sys, time
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("attempt", attempt, "rank", rank, "of", os.environ["WORLD_SIZE"], flush=True)
mode = sys.argv[1]
if mode == "save":
    signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), os._exit(143)))
    time.sleep(60)
if rank == 1 and attempt == 0:
    if mode == "raise":
        raise ValueError("bad data")
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60 if attempt == 0 else 0)
"""


def launcher(tmp_path: Path, mode: str, *options: str) -> "subprocess.Popen[str]":
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "autopar", "run", str(script), "--nproc", "2", *options]
    return subprocess.Popen(
        [*command, "--", mode], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_ranks_start_again_and_the_first_error_is_shown(tmp_path: Path) -> None:
    process = launcher(
        tmp_path, "raise", "--max-restarts", "1", "--log-dir", str(tmp_path / "logs")
    )
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert "rank 1 ended with exit status 1; its neighbours (rank 0) were ended; restart 1" in err
    assert "ValueError: bad data" in err
    assert out == "[0] attempt 0 rank 0 of 2\n[0] attempt 1 rank 0 of 2\n"
    logs = {path.relative_to(tmp_path / "logs"): path for path in tmp_path.rglob("logs/*/*")}
    names = {f"attempt-{k}/rank-{r}.{kind}" for k in "01" for r in "01" for kind in ("out", "err")}
    assert {str(name) for name in logs} == names
    assert "bad data" in logs[Path("attempt-0/rank-1.err")].read_text()


@pytest.mark.slow
def test_the_status_is_that_of_the_first_rank_that_failed(tmp_path: Path) -> None:
    process = launcher(tmp_path, "kill")
    _, err = process.communicate(timeout=100)
    assert process.returncode == 128 + signal.SIGKILL
    assert "rank 1 was killed by SIGKILL; its neighbours (rank 0) were ended; no restart is" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_ranks_save_on_sigterm_and_die_with_their_launcher(tmp_path: Path) -> None:
    process = launcher(tmp_path, "save")
    assert process.stdout is not None
    for _ in range(2):
        process.stdout.readline()
    time.sleep(0.2)  # the ranks listen
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=100)
    assert out == "saved\n" * 2
    assert process.returncode == 143
    assert "told to stop by SIGTERM" in err

    process = launcher(tmp_path, "save", "--grace", "1")
    assert process.stdout is not None
    for _ in range(2):
        process.stdout.readline()
    process.kill()
    process.stdout.read()  # ends when the last rank has ended
    assert process.wait() == -signal.SIGKILL


def test_a_range_of_machines_needs_a_meeting_point(capfd: pytest.CaptureFixture[str]) -> None:
    from autopar.cli import main

    assert main(["run", "train.py", "--nnodes", "1:4"]) == 2
    assert main(["run", "train.py", "--nnodes", "4:1"]) == 2
    err = capfd.readouterr().err
    assert "--endpoint HOST:PORT" in err
    assert "'4:1' is not a range such as 1:4" in err
    assert "AUTOPAR_LAUNCHED" not in os.environ
