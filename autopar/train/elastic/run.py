"""`run`: the ranks of this node, started again after failures; returns an exit status."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import resource
import signal
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousTimeoutError,
)

from autopar.core.waiting import awaited
from autopar.errors import CommunicationError, StrategyError
from autopar.runtime.lost_peers import LAUNCHED
from autopar.train.elastic.agent import KILL_S, LEFT, Agent, Failure
from autopar.train.elastic.logs import RankLogs
from autopar.train.elastic.rounds import Rounds, address_towards, say

RETRY = 75
"""Exit status where other nodes are missing: the same command may succeed later (EX_TEMPFAIL)."""

RECONNECT_S = 1.0

LAUNCHER_FILES = 24
"""Files that the launcher holds open itself; below, torch fails in many places."""

# A rank dies with its launcher: PR_SET_PDEATHSIG holds after exec.
# If the launcher died before prctl, no signal comes: hence the check of the parent.
_TIED = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); "
    "os.execv(sys.executable, [sys.executable, '-u', *sys.argv[2:]])"
)


@dataclass(frozen=True)
class Launch:
    """Command, ranks and nodes to start, and how often to start again.

    Attributes:
        command: script, or "-m" and a module, and its arguments.
        nproc: ranks of this node.
        nodes: least and largest number of nodes.
        endpoint: "host:port" where nodes meet; empty for one node.
        run_id: name of the run, the same on all its nodes; empty to derive it from the command.
        max_restarts: failures on this node after which ranks start again.
        log_dir: folder of the ranks' output; None for this terminal.
        grace_s: seconds that ranks have to save after SIGTERM.
        join_s: seconds to wait for enough nodes.
        silence_s: seconds after which a silent node counts as gone.
        environment: variables of the ranks, beside this process's.
    """

    command: Sequence[str]
    nproc: int
    nodes: tuple[int, int] = (1, 1)
    endpoint: str = ""
    run_id: str = ""
    max_restarts: int = 0
    log_dir: Path | None = None
    grace_s: float = 120.0
    join_s: int = 600
    silence_s: int = 5
    environment: Mapping[str, str] = field(default_factory=dict)


def run(launch: Launch) -> int:
    """Runs a script as ranks until they end.

    Returns:
        0 if all ranks did; 128 plus a signal's number if this launcher or its ranks were told to
        leave; `RETRY` if there were too few nodes; the status of the first rank that failed.

    Raises:
        StrategyError: this process may open too few files.
        CommunicationError: one node has no store for its ranks.
    """
    if _most_files() < LAUNCHER_FILES + launch.nproc:
        raise _too_few_files(launch)
    launch, logs = named(launch), RankLogs(launch.log_dir)
    patience_s = str(launch.silence_s + KILL_S)  # to learn which node is gone
    try:
        with _environment({**launch.environment, LAUNCHED: patience_s}), _raising_on_signals():
            return _run_until_over(launch, logs)
    except SignalException as told:
        say(f"told to stop by {told.sigval.name}; start the same command again to go on")
        return 128 + told.sigval
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        raise _too_few_files(launch) from error


def _most_files() -> int:
    """The number of files that this process may open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _too_few_files(launch: Launch) -> StrategyError:
    return StrategyError(
        f"the launcher may open {_most_files()} files, too few for {launch.nproc} ranks: raise "
        "ulimit -n"
    )


def _run_until_over(launch: Launch, logs: RankLogs) -> int:
    """Joins the other nodes, again where the connection to them is lost."""
    deadline, restarts = time.monotonic() + launch.join_s, launch.max_restarts
    rounds: Rounds | None = None
    while True:
        agent: Agent | None = None
        try:
            rounds = rounds or _joined(launch, deadline - time.monotonic())
            agent = _agent(launch, logs, rounds, restarts)
            result = agent.run()
            rounds.shutdown()
            if agent.left:
                return LEFT
            return agent.failure.status if result.is_failed() and agent.failure else 0
        except RendezvousClosedError:
            say("the run was ended on another node: its output says why")
            return 1
        except _MISSED as error:
            if launch.nodes == (1, 1):
                raise CommunicationError(f"no store for the ranks: {_line(error)}") from error
            if agent is not None and agent.has_started:
                deadline, restarts = time.monotonic() + launch.join_s, agent.restarts_left
            is_over = isinstance(error, (RendezvousTimeoutError, TimeoutError))
            if is_over or time.monotonic() > deadline:
                where = f"at {launch.endpoint} within {launch.join_s} s"
                say(f"too few nodes met {where}: {_line(error)}")
                return RETRY
            if rounds is not None:
                say(f"lost the other nodes ({_line(error)}); joins them again")
                # The other nodes come back to the server of this host, so it must stay.
                rounds = rounds if rounds.is_host or isinstance(error, DistStoreError) else None
            time.sleep(RECONNECT_S)


_MISSED = (RendezvousError, DistStoreError, DistNetworkError, TimeoutError)
"""Errors of torch, and of waits, where another node is not there."""


def named(launch: Launch) -> Launch:
    """The launch with an id: random on one node, on several the same where commands are."""
    if launch.run_id:
        return launch
    if launch.nodes == (1, 1):
        return replace(launch, run_id=uuid.uuid4().hex, endpoint="127.0.0.1:0")
    told = [str(os.getuid()), launch.endpoint, *map(str, launch.nodes), *launch.command]
    return replace(launch, run_id=hashlib.sha256("\0".join(told).encode()).hexdigest()[:16])


def _joined(launch: Launch, limit_s: float) -> Rounds:
    """The meetings of this node and the others, once there is a server."""
    if launch.nodes != (1, 1):
        say(
            f"meets machines at {launch.endpoint} as run {launch.run_id}. Whoever reaches it can "
            "run code here: keep it on a private network"
        )
    return awaited(partial(_rounds, launch), lambda: f"a server at {launch.endpoint}", limit_s, say)


def _rounds(launch: Launch) -> Rounds:
    is_single = launch.nodes == (1, 1)
    return Rounds(
        launch.run_id,
        launch.endpoint,
        launch.nodes,
        address="127.0.0.1" if is_single else address_towards(launch.endpoint),
        join_s=launch.join_s,
        silence_s=launch.silence_s,
    )


def _agent(launch: Launch, logs: RankLogs, rounds: Rounds, restarts: int) -> Agent:
    spec = WorkerSpec(
        role="rank",
        local_world_size=launch.nproc,
        rdzv_handler=rounds,
        entrypoint=sys.executable,
        args=_arguments(launch.command),
        max_restarts=restarts,
        monitor_interval=0.1,
        local_addr=rounds.address,
    )

    def report(failure: Failure, then: str) -> None:
        error, trouble = logs.error_of(failure.local_rank), logs.trouble_of(failure.local_rank)
        then += f". Its log is cut: {trouble}" if trouble else ""
        say(f"{failure}; {then}" + (f". It wrote:\n{error}" if error else ""))

    prefix = "[${rank}] " if launch.log_dir else None
    return Agent(spec, logs, rounds, prefix=prefix, grace_s=launch.grace_s, report=report)


def _arguments(command: Sequence[str]) -> tuple[str, ...]:
    """Arguments of Python for one rank."""
    if sys.platform != "linux":
        return ("-u", *command)
    # -I and -S are for the stub alone: exec drops them. Without -I, a ctypes.py in the working
    # folder would hide Python's.
    return ("-I", "-S", "-c", _TIED, str(os.getpid()), *command)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Adds variables for the ranks, and leaves out the agent's own account of failures."""
    before, disabled = dict(os.environ), logging.root.manager.disable
    os.environ.update(variables)
    if "LOGLEVEL" not in os.environ:
        logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(disabled)
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _raising_on_signals() -> Iterator[None]:
    """Raises SignalException on SIGTERM and SIGINT, before the first rank runs too."""

    def stop(number: int, frame: object) -> None:
        raise SignalException("told to stop", signal.Signals(number))

    before = {each: signal.signal(each, stop) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _line(error: BaseException) -> str:
    """The first line of an error's cause."""
    cause = error.__cause__ or error
    return (str(cause).splitlines() or [type(cause).__name__])[0]
