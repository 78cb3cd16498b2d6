"""`TimingContext`: conditions of operator timings, and the times that the cache has for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from autopar.cost_model import disk_cache
from autopar.cost_model.host import Host, device_name
from autopar.cost_model.kernels.settings import kernel_settings


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
        for fields in data["times"].values():
            disk_cache.check_numbers(
                {name: fields[name] for name in ("seconds", "flops", "nbytes")}
            )
        times = {key: Timing(**fields) for key, fields in data["times"].items()}
        return times, disk_cache.check_numbers(data.get("alone", {}))

    return disk_cache.read_cached(_path(setting), parse) or ({}, {})


def write_times(
    setting: TimingContext, times: Mapping[str, Timing], alone: Mapping[str, float]
) -> None:
    """Writes times to the cache of a setting, merged with those of other processes."""
    if not disk_cache.writes_for_host():
        return
    kept, kept_alone = read_times(setting)
    data = {
        "setting": setting.facts(),
        "times": {key: asdict(timing) for key, timing in {**kept, **times}.items()},
        "alone": {**kept_alone, **alone},
    }
    disk_cache.write_json(_path(setting), data)


def _path(setting: TimingContext) -> Path:
    return disk_cache.cache_directory() / "operators" / f"{disk_cache.digest(setting.facts())}.json"
