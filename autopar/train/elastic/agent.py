"""`Agent`: torchrun's agent of one node, which ends ranks that have lost another at once.

A rank that fails leaves the others waiting in a collective. They have nothing to save any more, so
they are killed. Ranks get SIGTERM only while all of them are alive: they save and leave.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs

from autopar._torch import rank_processes
from autopar.core.waiting import TELL_S, awaited
from autopar.train.elastic.rounds import Rounds, say

LEFT = 128 + signal.SIGTERM
"""Exit status of a rank, and of a launcher, that has saved and left because it was told to."""

EXIT_BARRIER_S = 60.0
KILL_S = 5  # seconds until a killed process must be gone


@dataclass(frozen=True)
class Failure:
    """The first failure among ranks of a node.

    Attributes:
        local_rank: number of the rank on this node.
        code: exit status; negative for a signal, as of subprocess.
    """

    rank: int
    local_rank: int
    code: int

    @property
    def status(self) -> int:
        """Exit status as shells give it."""
        return self.code if self.code >= 0 else 128 - self.code

    def __str__(self) -> str:
        if self.code >= 0:
            return f"rank {self.rank} ended with exit status {self.code}"
        return f"rank {self.rank} was killed by {signal.Signals(-self.code).name}"


class Agent(LocalElasticAgent):
    """Starts the ranks of this node, watches them, and starts them again.

    Attributes:
        failure: the last failure on this node.
        left: whether the ranks saved and left, and none will follow.

    Args:
        spec: what to run, and how often to start again.
        logs: where ranks write.
        rounds: the meetings of nodes.
        grace_s: seconds that ranks have to save after SIGTERM.
        report: is told of the first failure, and of what follows.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs: LogsSpecs,
        rounds: Rounds,
        *,
        prefix: str | None,
        grace_s: float,
        report: Callable[[Failure, str], None],
    ) -> None:
        super().__init__(
            spec, logs, exit_barrier_timeout=EXIT_BARRIER_S, log_line_prefix_template=prefix
        )
        self.rounds, self._grace_s, self._report = rounds, grace_s, report
        self.failure: Failure | None = None
        self.left = False

    @property
    def has_started(self) -> bool:
        """Whether ranks have run."""
        return self._pcontext is not None

    @property
    def restarts_left(self) -> int:
        """Number of failures after which ranks start again."""
        return self._remaining_restarts

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        meet = partial(super()._rendezvous, worker_group)
        awaited(meet, self.rounds.missing, self.rounds.limit_s, say)

    def _exit_barrier(self) -> None:
        with contextlib.suppress(TimeoutError):  # of a machine that has fallen silent
            others = "the other machines to end"
            awaited(super()._exit_barrier, lambda: others, EXIT_BARRIER_S, say)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """The state of the ranks; once one has failed, the others are ended."""
        # Polled before torch's monitor, which would send the others SIGTERM. They would try to
        # save, and wait for the dead rank.
        codes = {number: each.poll() for number, each in rank_processes(self._pcontext).items()}
        failed = [number for number, code in codes.items() if code]
        if not failed:
            return super()._monitor_workers(worker_group)
        first = failed[0]
        if codes[first] == LEFT:
            return self._after_leaving(worker_group)
        ranks = {number: worker_group.workers[number].global_rank for number in codes}
        self.failure = Failure(ranks[first], first, codes[first] or 0)
        self._shutdown()
        self._report(self.failure, self._what_follows(worker_group, ranks, first))
        return super()._monitor_workers(worker_group)

    def _what_follows(self, worker_group: WorkerGroup, ranks: Mapping[int, int], first: int) -> str:
        others = ", ".join(str(rank) for number, rank in ranks.items() if number != first)
        ended = f"its neighbours (rank {others}) were ended; " if others else ""
        most = worker_group.spec.max_restarts
        if not self.restarts_left:
            return f"{ended}no restart is left"
        return f"{ended}restart {most - self.restarts_left + 1} of {most}"

    def _after_leaving(self, worker_group: WorkerGroup) -> RunResult:
        """Ranks have saved and left, told by SIGTERM to one of them or to another node."""
        self._shutdown(signal.SIGTERM)
        if self.rounds.is_single_node:
            # With restarts left, torch would start ranks again that were told to leave.
            self.left, self._remaining_restarts = True, 0
            return super()._monitor_workers(worker_group)
        # A healthy group that wants another round is a change of members to torch, which uses up
        # no restart.
        self.rounds.rejoin = True
        return RunResult(state=WorkerState.HEALTHY)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Before another round: ranks save if all are there, so that growing loses no step."""
        self._shutdown(signal.SIGKILL if self.rounds.nodes_gone() else signal.SIGTERM)

    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGKILL, timeout: float | None = None
    ) -> None:
        """Ends the ranks: at once by SIGKILL, within `grace_s` seconds by any milder signal.

        They get SIGTERM for Ctrl-C too: Python meets no SIGINT inside of torch or an import.
        Only ranks get it, not their data loaders' processes, which feed the last steps.
        """
        if self._pcontext is None:
            return
        processes = rank_processes(self._pcontext)
        try:
            if death_sig != signal.SIGKILL:
                self._let_leave(processes)
        finally:
            self._pcontext.close(signal.SIGKILL, KILL_S)
            for each in processes.values():
                if each.poll():  # processes that it has started may hold its connections open
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(each.pid, signal.SIGKILL)

    def _let_leave(self, processes: Mapping[int, subprocess.Popen[bytes]]) -> None:
        """Tells the ranks to save and leave, and waits until they have."""
        for each in processes.values():
            each.send_signal(signal.SIGTERM)
        start = told = time.monotonic()
        while staying := [number for number, each in processes.items() if each.poll() is None]:
            now = time.monotonic()
            if now - start > self._grace_s:
                say(f"ranks did not leave within {self._grace_s:g} s and were killed")
                return
            if now - told > TELL_S:
                told, left_s = now, self._grace_s - (now - start)
                ranks = [self._worker_group.workers[number].global_rank for number in staying]
                say(f"waits for rank(s) {ranks} to save and leave, for {left_s:.0f} s at most")
            time.sleep(0.05)
