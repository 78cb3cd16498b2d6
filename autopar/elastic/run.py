"""`run`: the ranks of this node, started again after failures; returns an exit status."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousTimeoutError,
)

from autopar.elastic.agent import KILL_S, LEFT, Agent, Failure, say
from autopar.elastic.logs import RankLogs
from autopar.elastic.rounds import Rounds, address_towards
from autopar.runtime.lost_peers import LAUNCHED

RETRY = 75
"""Exit status where other nodes are missing: the same command may succeed later (EX_TEMPFAIL)."""

RECONNECT_S = 1.0

# A rank dies with its launcher: PR_SET_PDEATHSIG holds after exec.
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
        run_id: name of the run, the same on all its nodes.
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
    """
    os.environ.update(launch.environment)
    os.environ[LAUNCHED] = str(launch.silence_s + KILL_S)  # to learn which node is gone
    if "LOGLEVEL" not in os.environ:
        logging.disable(logging.CRITICAL)  # the agent's own account of failures
    logs = RankLogs(launch.log_dir)
    try:
        with _raising_on_signals():
            return _run_until_over(launch, logs)
    except SignalException as told:
        say(f"told to stop by {told.sigval.name}; start the same command again to go on")
        return 128 + told.sigval


def _run_until_over(launch: Launch, logs: RankLogs) -> int:
    """Joins the other nodes, again where the connection to them is lost."""
    deadline, restarts = time.monotonic() + launch.join_s, launch.max_restarts
    rounds: Rounds | None = None
    while True:
        agent: Agent | None = None
        try:
            rounds = rounds or _rounds(launch)
            agent = _agent(launch, logs, rounds, restarts)
            result = agent.run()
            rounds.shutdown()
            if agent.left:
                return LEFT
            return agent.failure.status if result.is_failed() and agent.failure else 0
        except RendezvousClosedError:
            say("the run was ended on another node: its output says why")
            return 1
        except (RendezvousError, DistStoreError, DistNetworkError) as error:
            if agent is not None and agent.has_started:
                deadline, restarts = time.monotonic() + launch.join_s, agent.restarts_left
            if isinstance(error, RendezvousTimeoutError) or time.monotonic() > deadline:
                where = f"at {launch.endpoint} within {launch.join_s} s"
                say(f"too few nodes met {where}: {_line(error)}")
                return RETRY
            if rounds is not None:
                say(f"lost the other nodes ({_line(error)}); joins them again")
                rounds = rounds if rounds.is_host or isinstance(error, DistStoreError) else None
            time.sleep(RECONNECT_S)


def _rounds(launch: Launch) -> Rounds:
    """The meetings of this node and the others."""
    alone = launch.nodes == (1, 1)
    return Rounds(
        launch.run_id or (uuid.uuid4().hex if alone else "autopar"),
        "127.0.0.1:0" if alone else launch.endpoint,
        launch.nodes,
        address="127.0.0.1" if alone else address_towards(launch.endpoint),
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
        error = logs.error_of(failure.local_rank)
        say(f"{failure}; {then}" + (f". It wrote:\n{error}" if error else ""))

    prefix = "[${rank}] " if launch.log_dir else None
    return Agent(spec, logs, rounds, prefix=prefix, grace_s=launch.grace_s, report=report)


def _arguments(command: Sequence[str]) -> tuple[str, ...]:
    """Arguments of Python for one rank."""
    if sys.platform != "linux":
        return ("-u", *command)
    return ("-I", "-S", "-c", _TIED, str(os.getpid()), *command)


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
