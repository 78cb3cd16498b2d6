"""`launch`: runs a command on every node of a network, one process a rank, until all end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.cluster.network import Network

MASTER_PORT = 29500  # free on every node, since each has its own network namespace
GRACE_S = 15.0  # seconds for the other ranks to end by themselves after one has failed

_NAMED = 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"'


class RanksFailed(RuntimeError):
    """A rank failed; the message has its number, the reason, and the end of its log."""


def launch(
    network: Network,
    command: Sequence[str],
    ranks_per_node: int,
    *,
    logs: Path | None = None,
    timeout_s: float | None = None,
    grace_s: float = GRACE_S,
) -> None:
    """Run `command` as every rank and wait for all. None of them outlives the call.

    Each has torchrun's variables, its node's host name and GLOO_SOCKET_IFNAME. If the command is
    itself torchrun, use one rank a node and `--node-rank $GROUP_RANK --master-addr $MASTER_ADDR`.

    `logs` is a folder for one file a rank, "rank0.log" and so on; None shows the output here. The
    others have `grace_s` seconds after a rank has failed.

    Raises:
        RanksFailed: a rank ended with a status other than 0, or time ran out.
    """
    world = network.nodes * ranks_per_node
    if ranks_per_node < 1:
        raise ValueError(f"{ranks_per_node} ranks a node: at least one")
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world):
            log = logs and logs / f"rank{rank}.log"
            processes.append(start(network, command, rank, ranks_per_node, log=log))
        failure = _watch(processes, timeout_s, grace_s)
    finally:
        for process in processes:  # and the processes that it has started
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if failure is not None:
        rank, reason = failure
        if logs is not None:
            lines = (logs / f"rank{rank}.log").read_text(errors="replace").strip().splitlines()
            reason = "\n".join([f"{reason}:", *lines[-15:]])
        raise RanksFailed(f"rank {rank} {reason}")


def _environment(network: Network, rank: int, ranks_per_node: int) -> dict[str, str]:
    node, local = divmod(rank, ranks_per_node)
    world = network.nodes * ranks_per_node
    threads = max(1, (os.cpu_count() or 1) // world)
    return {
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(local),
        "GROUP_RANK": str(node),
        "ROLE_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(ranks_per_node),
        "GROUP_WORLD_SIZE": str(network.nodes),
        "ROLE_WORLD_SIZE": str(world),
        "MASTER_ADDR": network.address(0),
        "NCCL_HOSTID": network.host_name(node),  # all nodes are one machine
        "MASTER_PORT": str(MASTER_PORT),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": network.namespace(0),
        "GLOO_SOCKET_IFNAME": "eth0",
    }


def start(
    network: Network,
    command: Sequence[str],
    rank: int,
    ranks_per_node: int,
    *,
    environment: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Run `command` as one rank, in a process group of its own."""
    variables = _environment(network, rank, ranks_per_node) | dict(environment or {})
    node = rank // ranks_per_node
    inside = ["ip", "netns", "exec", network.namespace(node), "unshare", "--uts", "--"]
    inside += ["setpriv", "--pdeathsig", "KILL", "--"]  # ends with this process, however it ends
    inside += ["sh", "-c", _NAMED, network.host_name(node), *command]
    if log is None:
        return subprocess.Popen(inside, env=variables, start_new_session=True)
    with log.open("wb") as file:
        return subprocess.Popen(
            inside, env=variables, start_new_session=True, stdout=file, stderr=subprocess.STDOUT
        )


def _watch(
    processes: Sequence[subprocess.Popen[bytes]], timeout_s: float | None, grace_s: float
) -> tuple[int, str] | None:
    """Wait for all; return the first rank that failed and the reason, or None."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    failure: tuple[int, str] | None = None
    while True:
        codes = [process.poll() for process in processes]
        if failure is None:
            failure = next(((r, _reason(code)) for r, code in enumerate(codes) if code), None)
            if failure is not None:
                grace = time.monotonic() + grace_s
                deadline = grace if deadline is None else min(deadline, grace)
        if None not in codes:
            return failure
        if deadline is not None and time.monotonic() > deadline:
            return failure or (codes.index(None), f"was still busy after {timeout_s:g} s")
        time.sleep(0.05)


def _reason(code: int) -> str:
    return f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
