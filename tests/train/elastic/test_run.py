"""Ranks that fail are started again; what the launcher says, keeps and returns."""

import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopar.cli.main import main
from autopar.errors import StrategyError
from autopar.train.elastic.run import RETRY, Launch, named, run

SCRIPT = """
import os, signal, sys, time
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
mode = sys.argv[1]
if mode == "save":
    signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), os._exit(143)))
if mode == "deaf":  # as an import is, or torch
    signal.signal(signal.SIGINT, signal.SIG_IGN)
if mode == "orphan" and rank == 1 and not os.fork():
    open(f"{sys.argv[2]}/child-{os.getpid()}", "w").close()
    time.sleep(60)
    os._exit(0)
if mode == "orphan":
    time.sleep(0.5)
print("attempt", attempt, "rank", rank, "of", os.environ["WORLD_SIZE"], flush=True)
open(f"{sys.argv[2]}/port", "w").write(os.environ["MASTER_PORT"])
open(f"{sys.argv[2]}/pid-{rank}-{attempt}-{os.getpid()}", "w").close()
if rank == 1 and attempt == 0 and mode == "raise":
    raise ValueError("bad data")
if rank == 1 and attempt == 0 and mode in ("kill", "orphan"):
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60 if attempt == 0 or mode == "save" else 0)
"""


class Launcher:
    """A launcher in a process forked from this one, which saves imports."""

    def __init__(self, folder: Path, mode: str, **options: Any) -> None:
        self.folder = folder
        (folder / "script.py").write_text(SCRIPT)
        command = [str(folder / "script.py"), mode, str(folder)]
        self.pid = os.fork()
        if not self.pid:
            try:
                for target in (1, 2):
                    os.dup2(os.open(folder / f"std{target}", os.O_WRONLY | os.O_CREAT), target)
                sys.stdout = os.fdopen(1, "w", buffering=1)
                sys.stderr = os.fdopen(2, "w", buffering=1)
                os._exit(run(Launch(command, 2, **options)))
            finally:
                os._exit(99)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def ranks(self, attempt: int = 0) -> list[int]:
        """Processes of an attempt, once both ranks have started."""
        for _ in range(2000):
            found = list(self.folder.glob(f"pid-*-{attempt}-*"))
            if len(found) == 2:
                return [int(path.name.split("-")[-1]) for path in found]
            time.sleep(0.05)
        raise AssertionError((self.folder / "std2").read_text())

    def until(self, text: str) -> None:
        """Waits until the launcher has said a text."""
        for _ in range(2000):
            if (self.folder / "std2").exists() and text in self.said():
                return
            time.sleep(0.01)
        raise AssertionError(self.said())

    def said(self, stream: int = 2) -> str:
        return (self.folder / f"std{stream}").read_text()


def is_running(pid: int) -> bool:
    path = Path(f"/proc/{pid}/stat")
    return path.exists() and path.read_text().split()[2] != "Z"


def test_ranks_start_again_and_the_first_error_is_shown(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, "raise", max_restarts=1, log_dir=tmp_path / "logs")
    assert launcher.wait() == 0, launcher.said()
    err = launcher.said()
    assert "rank 1 ended with exit status 1; its neighbours (rank 0) were ended; restart 1" in err
    assert "ValueError: bad data" in err
    assert launcher.said(1).endswith("[0] attempt 1 rank 0 of 2\n")
    logs = {str(path.relative_to(tmp_path / "logs")) for path in tmp_path.glob("logs/*/*")}
    assert logs == {
        f"attempt-{k}/rank-{r}.{kind}" for k in "01" for r in "01" for kind in ("out", "err")
    }
    assert "bad data" in (tmp_path / "logs/attempt-0/rank-1.err").read_text()


def test_the_status_is_that_of_the_first_rank_that_failed(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, "kill")
    assert launcher.wait() == 128 + signal.SIGKILL
    assert "rank 1 was killed by SIGKILL; its neighbours (rank 0) were ended" in launcher.said()
    assert "no restart is left" in launcher.said()


@pytest.mark.parametrize("whom", ["launcher", "rank"])
def test_ranks_save_when_told_to_leave(tmp_path: Path, whom: str) -> None:
    launcher = Launcher(tmp_path, "save", max_restarts=3)
    ranks = launcher.ranks()
    os.kill(launcher.pid if whom == "launcher" else ranks[0], signal.SIGTERM)
    assert launcher.wait() == 143
    assert launcher.said(1).count("saved") == 2
    assert "attempt 1" not in launcher.said(1)


def test_ranks_end_with_their_launcher(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, "save")
    ranks = launcher.ranks()
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.wait()
    for _ in range(200):
        if not any(map(is_running, ranks)):
            return
        time.sleep(0.05)
    raise AssertionError("a rank outlives its launcher")


def test_too_few_machines(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, "save", nodes=(2, 2), endpoint="127.0.0.1:29417", join_s=1)
    assert launcher.wait() == RETRY
    assert "too few nodes met at 127.0.0.1:29417 within 1 s" in launcher.said()


def test_a_range_of_machines_needs_a_meeting_point(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "train.py", "--nnodes", "1:4"]) == 2
    assert main(["run", "train.py", "--nnodes", "4:1"]) == 2
    err = capsys.readouterr().err
    assert "--endpoint HOST:PORT" in err
    assert "'4:1' is not a range such as 1:4" in err


@pytest.fixture
def silent_server() -> Iterator[str]:
    """An endpoint that accepts connections, and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGINT])
def test_a_launcher_leaves_a_server_that_never_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent_server: str, told: signal.Signals
) -> None:
    monkeypatch.setattr("autopar.core.waiting.TELL_S", 0.1)
    launcher = Launcher(tmp_path, "save", nodes=(2, 2), endpoint=silent_server)
    launcher.until(f"waits for a server at {silent_server}")
    start = time.monotonic()
    os.kill(launcher.pid, told)
    assert launcher.wait() == 128 + told
    assert time.monotonic() - start < 5
    assert "private network" in launcher.said()


def test_a_server_that_never_answers_is_left_after_a_while(
    tmp_path: Path, silent_server: str
) -> None:
    launcher = Launcher(tmp_path, "save", nodes=(2, 2), endpoint=silent_server, join_s=1)
    assert launcher.wait() == RETRY
    assert f"waited for a server at {silent_server} for 1 s" in launcher.said()


def test_ctrl_c_ends_ranks_that_do_not_hear_it(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, "deaf")
    launcher.ranks()
    start = time.monotonic()
    os.kill(launcher.pid, signal.SIGINT)
    assert launcher.wait() == 130
    assert time.monotonic() - start < 5


def test_processes_of_a_killed_rank_end_with_it(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, "orphan")
    assert launcher.wait() == 128 + signal.SIGKILL
    (child,) = tmp_path.glob("child-*")
    for _ in range(100):
        if not is_running(int(child.name.removeprefix("child-"))):
            return
        time.sleep(0.05)
    raise AssertionError("it holds the connections of the rank open")


def test_one_machine_listens_on_loopback_alone(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, "save")
    launcher.ranks()
    port = int((tmp_path / "port").read_text())
    socket.create_connection(("127.0.0.1", port)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port))  # loopback as well, another address
    os.kill(launcher.pid, signal.SIGTERM)
    assert launcher.wait() == 143


def test_too_few_files_are_named() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with pytest.raises(StrategyError, match="may open 3 files, too few for 2 ranks"):
            run(Launch(["a.py"], 2))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_ids_of_runs() -> None:
    alone, many = Launch(["a.py"], 2), Launch(["a.py"], 2, (2, 2), "head:29400")
    assert named(alone).run_id != named(alone).run_id
    assert named(many).run_id == named(replace(many, nproc=4)).run_id
    assert named(many).run_id != named(replace(many, command=["a.py", "--lr", "1"])).run_id
    assert named(replace(many, run_id="mine")).run_id == "mine"


@pytest.mark.parametrize("endpoint", ["head:99999", "head:0", "head:x", ":29400", "a b/c"])
def test_wrong_endpoints(capsys: pytest.CaptureFixture[str], endpoint: str) -> None:
    assert main(["run", "train.py", "--nnodes", "2", "--endpoint", endpoint]) == 2
    assert "is not HOST:PORT with a port from 1 to 65535" in capsys.readouterr().err
