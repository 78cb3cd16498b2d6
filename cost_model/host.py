"""`Host`: facts of this machine that measurements depend on."""

from __future__ import annotations

import os
import platform
import socket
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch


@dataclass(frozen=True)
class Host:
    """Facts of this machine and process: `cores` it may use, `threads` of one torch operator."""

    name: str
    cpu: str
    cores: int
    threads: int
    memory_bytes: int
    torch: str

    @classmethod
    def here(cls) -> Host:
        if hasattr(os, "sched_getaffinity"):
            cores = len(os.sched_getaffinity(0))
        else:
            cores = os.cpu_count() or 1
        return cls(
            name=socket.gethostname(),
            cpu=_cpu_model(),
            cores=cores,
            threads=torch.get_num_threads(),
            memory_bytes=_pages("SC_PHYS_PAGES"),
            torch=str(torch.__version__),
        )


def oversubscription(ranks: int, threads: int) -> float:
    """Computing threads of `ranks` on this machine for each of its cores, at least 1."""
    return max(1.0, ranks * threads / Host.here().cores)


def shares_cores(ranks: int, threads: int) -> bool:
    """Whether ranks share cores, and CPU time tells: threads of operators have own clocks."""
    return threads == 1 and oversubscription(ranks, threads) > 1.0


@lru_cache
def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def node_id() -> str:
    """Identity of this machine among those that ranks are on, the same in all its containers.

    NCCL_HOSTID overrides it, as it does for NCCL.
    """
    return os.environ.get("NCCL_HOSTID") or boot_id()


@lru_cache
def boot_id() -> str:
    """Unique id of this machine until it reboots; the same in all its namespaces."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def free_memory_bytes(device: str = "cpu") -> int:
    """Free bytes of this machine ("cpu") or of this process's GPU ("cuda"); 0 if unknown.

    On a GPU, what torch's allocator has reserved and does not use is free, too.
    """
    if device == "cpu":
        return _pages("SC_AVPHYS_PAGES")
    unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return torch.cuda.mem_get_info()[0] + unused


def _pages(name: str) -> int:
    try:
        return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 0


def device_name(device: torch.device) -> str:
    """Model name of the processor or GPU; "cuda" for a GPU that is not in this machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device) if torch.cuda.is_available() else "cuda"
    return _cpu_model()
