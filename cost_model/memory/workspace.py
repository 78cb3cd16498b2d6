"""`Workspace`: memory that kernels allocate for themselves, which no graph shows.

Attention, for instance, needs a block of scores for each thread, and a layer norm's backward
partial sums. The bytes depend on the kernel, its shapes and the number of threads, so they are
measured.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from autopar.core.ir.aliases import computes
from autopar.core.ir.graph import TrainingGraph
from autopar.core.ir.signature import signature
from autopar.cost_model import disk_cache
from autopar.cost_model.host import Host, device_name
from autopar.cost_model.kernels.origin import without_foreign
from autopar.cost_model.kernels.settings import kernel_settings
from autopar.cost_model.kernels.timing import operator_bytes, operator_limit, runnable
from autopar.cost_model.memory.allocation_tracker import track_allocations

_KIND = "scratch"  # of files in the cache


@dataclass(frozen=True)
class Workspace:
    """Bytes of workspace of each operator, by its signature.

    Attributes:
        device: type of the device, "cpu" or "cuda".
        setting: conditions of the measurement: device, threads, torch and its settings.
        present: whether the device is in this machine, so that more can be measured.
        nbytes: workspace in bytes of each operator that was run; mostly 0.
    """

    device: str = "cpu"
    setting: Mapping[str, Any] = field(default_factory=dict)
    present: bool = False
    nbytes: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def load(cls, device: str, runs_on: str = "cuda") -> Workspace:
        """The measurements of this machine's cache for "cpu", "cuda" or the name of any GPU.

        A model that `runs_on` "cpu" tells nothing about a GPU, even where there is one.
        """
        cpu = device == "cpu"
        gpu = "" if cpu or not torch.cuda.is_available() else device_name(torch.device("cuda"))
        name = gpu if gpu and device == "cuda" else device
        host, present = Host.here(), cpu or (name == gpu and runs_on == "cuda")
        setting = {
            "device": name,
            "model": host.cpu if cpu else name,
            "threads": host.threads if cpu else 0,
            "torch": host.torch,
        }
        kind = "cpu" if cpu else "cuda"
        if present and (kernels := kernel_settings(kind)):
            setting["kernels"] = kernels
        return cls(kind, setting, present, _cached(setting))

    def measure(self, graphs: Iterable[TrainingGraph], limit_s: float = math.inf) -> Workspace:
        """This, with the workspace of the operators of lowered graphs that were not yet run.

        The smallest come first, and those after `limit_s` seconds are left out.
        """
        if not self.present:
            return self
        missing: dict[str, fx.Node] = {}
        for graph in graphs:
            missing |= {signature(node): node for node in graph.calls() if computes(node)}
        missing = {key: node for key, node in missing.items() if key not in self.nbytes}
        generators = [] if self.device == "cpu" else [torch.cuda.current_device()]
        with torch.random.fork_rng(generators), torch.no_grad():
            measured = dict(_measured(missing, self.device, time.monotonic() + limit_s))
        return replace(self, nbytes={**self.nbytes, **measured})

    def save(self) -> None:
        """Writes the bytes to the cache, merged with those of other processes."""
        if not disk_cache.writes_for_host():
            return
        nbytes = without_foreign({**_cached(self.setting), **self.nbytes})
        disk_cache.write_cached(_KIND, self.setting, {"setting": self.setting, "nbytes": nbytes})

    def of(self, node: fx.Node) -> int:
        """Bytes that an operator allocates beyond its results; 0 if it was not run."""
        if node.op != "call_function" or str(node.target) not in self._targets:
            return 0
        return self.nbytes.get(signature(node), 0)

    @cached_property
    def _targets(self) -> frozenset[str]:
        """The few operators with a workspace at some shape."""
        return frozenset(key.partition("(")[0] for key, size in self.nbytes.items() if size)


def _measured(nodes: Mapping[str, fx.Node], device: str, end_s: float) -> Iterator[tuple[str, int]]:
    for key, node in sorted(nodes.items(), key=lambda item: operator_bytes(item[1])):
        if time.monotonic() > end_s:
            return
        if (nbytes := _measure(node, device)) is not None:
            yield key, nbytes


def _measure(node: fx.Node, device: str) -> int | None:
    """Bytes that an operator allocates beyond its results.

    None if it cannot be run, its tensors would not fit, or a profiler is running.
    """
    if operator_bytes(node) > operator_limit(device):
        return None
    call = runnable(node)
    try:
        allocated = None if call is None else track_allocations(call, device)
    except RuntimeError:
        return None
    return None if allocated is None else max(0, allocated.peak - allocated.retained)


def _cached(setting: Mapping[str, Any]) -> dict[str, int]:
    """The bytes in the cache of this setting."""

    def parse(data: Any) -> dict[str, int]:
        return disk_cache.check_numbers(data["nbytes"]) if data["setting"] == setting else {}

    return without_foreign(disk_cache.read_cached(_KIND, setting, parse) or {})
