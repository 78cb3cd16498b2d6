"""`TimingContext`: conditions of operator timings, and the times that the cache has for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import torch

from autopar.cost_model import disk_cache
from autopar.cost_model.host import Host, device_name
from autopar.cost_model.kernels.origin import without_foreign
from autopar.cost_model.kernels.settings import kernel_settings

_KIND = "operators"  # of files in the cache
_FIGURES = ("seconds", "flops", "nbytes", "host_s")


@dataclass(frozen=True)
class Timing:
    """One timed operator: the median of its runs, its work, and the date as YYYY-MM-DD.

    `flops` is 0 except for matrix products and the like. `nbytes` are the bytes read and written.
    `rehearsed` tells whether it was timed inside a replayed step, not alone. `host_s` are the
    seconds of the host that issues it to a GPU, which `seconds` exclude.
    """

    seconds: float
    flops: float
    nbytes: int
    day: str
    rehearsed: bool = False
    host_s: float = 0.0


@dataclass(frozen=True)
class TimingContext:
    """Conditions of a timing; times of other conditions do not count.

    `threads` are those of one operator. `sharing` is the number of ranks that share the host's
    cores and are timed at once. `kernels` has the settings of `kernel_settings`, if present.
    """

    device: str
    model: str
    threads: int
    sharing: int
    torch: str
    kernels: str = ""

    def facts(self) -> dict[str, Any]:
        """The key of a cache; settings of torch only where they are not its defaults."""
        return {name: fact for name, fact in asdict(self).items() if fact != ""}


def resolve(device: str, sharing: int, runs_on: str) -> tuple[TimingContext, bool]:
    """The setting of a device by its type or name, and whether models run on it here."""
    host = Host.here()
    cuda = device != "cpu" and torch.cuda.is_available()  # looking at it makes a context
    gpu = device_name(torch.device("cuda")) if cuda else ""
    if device == "cpu":
        name, model, present = "cpu", host.cpu, True
    elif device.split(":")[0] == "cuda":
        name, model, present = gpu or "cuda", gpu or "cuda", cuda
    else:
        name, model, present = device, device, device == gpu and runs_on == "cuda"
    kernels = kernel_settings("cpu" if name == "cpu" else "cuda") if present else ""
    return TimingContext(name, model, host.threads, sharing, host.torch, kernels), present


def read_times(setting: TimingContext) -> tuple[dict[str, Timing], dict[str, float]]:
    """The times in the cache of this setting, in steps and alone."""

    def parse(data: Any) -> tuple[dict[str, Timing], dict[str, float]]:
        if data["setting"] != setting.facts():
            return {}, {}
        times = msgspec.convert(data["times"], dict[str, Timing])
        for timing in times.values():
            disk_cache.check_numbers({name: getattr(timing, name) for name in _FIGURES})
        return times, disk_cache.check_numbers(data.get("alone", {}))

    times, alone = disk_cache.read_cached(_KIND, setting.facts(), parse) or ({}, {})
    return without_foreign(times), without_foreign(alone)


def write_times(
    setting: TimingContext, times: Mapping[str, Timing], alone: Mapping[str, float]
) -> None:
    """Writes times to the cache of a setting, merged with those of other processes."""
    if not disk_cache.writes_for_host():
        return
    kept, kept_alone = read_times(setting)
    data = {
        "setting": setting.facts(),
        "times": {k: asdict(timing) for k, timing in without_foreign({**kept, **times}).items()},
        "alone": without_foreign({**kept_alone, **alone}),
    }
    disk_cache.write_cached(_KIND, setting.facts(), data)
