"""`Workspace`: what kernels allocate for themselves while they run, which no graph shows.

Attention keeps a block of scores for each thread, a layer norm's backward partial sums, and so
on. It depends on the kernel, its shapes and the number of threads, so it is measured, not modelled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import fx

from autopar.cost_model.collectives import collective_of
from autopar.cost_model.disk_cache import (
    cache_directory,
    check_numbers,
    digest,
    read_cached,
    write_json,
)
from autopar.cost_model.host import Host, device_name, free_memory_bytes
from autopar.cost_model.kernels.aliases import extent_bytes, is_view
from autopar.cost_model.kernels.signature import signature
from autopar.cost_model.kernels.timing import runnable
from autopar.cost_model.memory.allocation_tracker import track_allocations
from autopar.ir.graph import TrainingGraph, tensors

_MEMORY_SHARE = 0.25  # of what is free, that the tensors of one operator may take


@dataclass(frozen=True)
class Workspace:
    """Bytes of scratch of each operator, by its signature.

    Attributes:
        device: type of the device, "cpu" or "cuda".
        setting: what the bytes depend on beside the operator: device, threads, version of torch.
        present: whether the device is in this machine, so that more can be measured.
        nbytes: the scratch of each operator that was run; 0 of most.
    """

    device: str = "cpu"
    setting: Mapping[str, Any] = field(default_factory=dict)
    present: bool = False
    nbytes: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def load(cls, device: str) -> Workspace:
        """What was measured before on this machine and kept on disk.

        Args:
            device: "cpu", "cuda", or the name of a GPU, in this machine or not.
        """
        cpu = device == "cpu"
        here = "" if cpu or not torch.cuda.is_available() else device_name(torch.device("cuda"))
        host = Host.here()
        setting = {
            "device": "cpu" if cpu else here or device,
            "model": host.cpu if cpu else here or device,
            "threads": host.threads if cpu else 0,
            "torch": host.torch,
        }
        present = cpu or device.partition(":")[0] in ("cuda", here)
        present = present and (cpu or bool(here))
        return cls("cpu" if cpu else "cuda", setting, present, _kept(setting))

    def measure(self, graphs: Iterable[TrainingGraph]) -> Workspace:
        """This, and the scratch of those operators of `graphs` that were not yet run.

        Args:
            graphs: lowered graphs.
        """
        if not self.present:
            return self
        missing: dict[str, fx.Node] = {}
        for graph in graphs:
            missing |= {signature(node): node for node in graph.calls() if _is_kernel(node)}
        missing = {key: node for key, node in missing.items() if key not in self.nbytes}
        with torch.random.fork_rng(range(torch.cuda.device_count())), torch.no_grad():
            found = {key: _scratch(node, self.device) for key, node in missing.items()}
        new = {key: nbytes for key, nbytes in found.items() if nbytes is not None}
        return replace(self, nbytes={**self.nbytes, **new})

    def save(self) -> None:
        """Keep the bytes on disk, with those that other processes have kept meanwhile."""
        nbytes = {**_kept(self.setting), **self.nbytes}
        write_json(_path(self.setting), {"setting": self.setting, "nbytes": nbytes})

    def of(self, node: fx.Node) -> int:
        """Bytes that an operator needs beyond its arguments and results; 0 if it was not run."""
        if node.op != "call_function" or str(node.target) not in self._needy:
            return 0
        return self.nbytes.get(signature(node), 0)

    @cached_property
    def _needy(self) -> frozenset[str]:
        """The operators of which some need scratch: few."""
        return frozenset(key.partition("(")[0] for key, size in self.nbytes.items() if size)


def _is_kernel(node: fx.Node) -> bool:
    return node.op == "call_function" and not is_view(node) and collective_of(node) is None


def _scratch(node: fx.Node, device: str) -> int | None:
    """What an operator allocates beyond its results.

    None if it cannot be run, its tensors would not fit, or a profiler runs already: then it counts
    as nothing.
    """
    limit = _MEMORY_SHARE * (free_memory_bytes() or math.inf)
    if sum(extent_bytes(t) for n in (node, *node.all_input_nodes) for t in tensors(n)) > limit:
        return None
    call = runnable(node)
    try:
        allocated = None if call is None else track_allocations(call, device)
    except RuntimeError:
        return None
    return None if allocated is None else max(0, allocated.peak - allocated.retained)


def _path(setting: Mapping[str, Any]) -> Path:
    return cache_directory() / "scratch" / f"{digest(setting)}.json"


def _kept(setting: Mapping[str, Any]) -> dict[str, int]:
    """The bytes on disk; none where the setting was another."""

    def parse(data: Any) -> dict[str, int]:
        return check_numbers(data["nbytes"]) if data["setting"] == setting else {}

    return read_cached(_path(setting), parse) or {}
