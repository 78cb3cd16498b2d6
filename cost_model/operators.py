"""`OperatorTimes`: how long every operator takes at its local shapes, timed here or modelled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import fx

from autopar.cost_model.aliases import is_view
from autopar.cost_model.collectives import collective_of
from autopar.cost_model.cost import ClusterError, Cost
from autopar.cost_model.host import Host, device_name
from autopar.cost_model.roofline import Roofline
from autopar.cost_model.signature import moved_bytes, signature
from autopar.cost_model.store import cache_directory, digest, read_json, write_json
from autopar.cost_model.timing import Stopwatch, flops_of, time_dispatch
from autopar.graph import TrainingGraph, tensors

_DISPATCH = "dispatch"  # the key of a call that computes nothing


@dataclass(frozen=True)
class Timing:
    """One timed operator.

    Attributes:
        seconds: median of its runs.
        flops: floating-point operations, 0 but for matrix products and the like.
        nbytes: bytes read and written.
        day: when, as YYYY-MM-DD.
    """

    seconds: float
    flops: float
    nbytes: int
    day: str


@dataclass(frozen=True)
class Setting:
    """Where and how operators were timed; times from another setting do not count.

    Attributes:
        device: "cpu" or the name of the GPU.
        model: the model name of the processor or GPU.
        threads: threads of one operator.
        sharing: ranks that share the host's cores and are timed at once.
        torch: version of torch.
    """

    device: str
    model: str
    threads: int
    sharing: int
    torch: str


@dataclass(frozen=True)
class OperatorTimes:
    """Times by signature.

    Attributes:
        setting: where they were taken.
        present: whether that device is in this machine, so that more can be timed.
        times: the timing of each signature.
    """

    setting: Setting
    present: bool
    times: Mapping[str, Timing] = field(default_factory=dict)

    @classmethod
    def load(cls, device: str | torch.device, *, sharing: int = 1) -> OperatorTimes:
        """What was timed before on this machine and kept on disk.

        Args:
            device: "cpu", "cuda", or the name of a GPU, in this machine or not.
            sharing: number of ranks that run on this host at once.
        """
        setting, present = _resolve(str(device), sharing)
        kept = read_json(_path(setting))
        times = _read(kept["times"]) if _of(kept, setting) else {}
        return cls(setting, present, times)

    def measure(self, graphs: Iterable[TrainingGraph], *, budget_s: float = 0.02) -> OperatorTimes:
        """These times and those of the operators of `graphs` that were missing.

        Where ranks share cores, all of them call this at once: the times contain the contention.

        Args:
            graphs: lowered graphs.
            budget_s: seconds to spend on each operator, but at least three runs.
        """
        if not self.present:
            return self
        missing: dict[str, fx.Node] = {}
        for graph in graphs:
            missing |= {signature(node): node for node in graph.calls() if _is_timed(node)}
        missing = {key: node for key, node in missing.items() if key not in self.times}
        today = str(date.today())
        seconds = Stopwatch(budget_s).times(missing)
        new = {
            key: Timing(taken, flops_of(missing[key]), moved_bytes(missing[key]), today)
            for key, taken in seconds.items()
        }
        if _DISPATCH not in self.times:
            device = "cpu" if self.setting.device == "cpu" else "cuda"
            new[_DISPATCH] = Timing(time_dispatch(device), 0, 0, today)
        return replace(self, times={**self.times, **new})

    def merged(self, other: OperatorTimes) -> OperatorTimes:
        """These times and the other's; where both have one, the other's."""
        if other.setting != self.setting:
            raise ClusterError(f"operators timed under {other.setting} are not of {self.setting}")
        return replace(self, times={**self.times, **other.times})

    def save(self) -> None:
        """Keep the times on disk, with those that other processes have kept meanwhile."""
        path = _path(self.setting)
        kept = read_json(path)
        before = kept["times"] if _of(kept, self.setting) else {}
        now = {key: asdict(timing) for key, timing in self.times.items()}
        write_json(path, {"setting": asdict(self.setting), "times": {**before, **now}})

    def seconds(self, node: fx.Node) -> Cost:
        """The time of a node: measured if it was timed, otherwise modelled by the roofline.

        Views, waits and the issuing of collectives cost the dispatch of a call; placeholders and
        the output nothing.
        """
        if node.op != "call_function":
            return _NOTHING
        if not _is_timed(node):
            return self._dispatch
        return self._costs.get(signature(node)) or self._modelled(node)

    def _modelled(self, node: fx.Node) -> Cost:
        line = self.roofline
        item = min((t.element_size() for t in tensors(node)), default=4)
        return Cost(
            line.seconds(flops_of(node), moved_bytes(node), item), f"modelled by {line.source}"
        )

    @cached_property
    def roofline(self) -> Roofline:
        """What stands in for the operators that were not timed."""
        line = Roofline.default(self.setting.device, self.setting.threads)
        timed = [(t.flops, t.nbytes, t.seconds) for t in self.times.values()]
        if _DISPATCH not in self.times:
            return line
        return line.fitted(timed, self.times[_DISPATCH].seconds)

    @cached_property
    def _costs(self) -> dict[str, Cost]:
        where = f"on {self.setting.model}, {self.setting.threads} threads"
        return {
            key: Cost(timing.seconds, f"measured {timing.day} {where}")
            for key, timing in self.times.items()
        }

    @cached_property
    def _dispatch(self) -> Cost:
        modelled = Cost(self.roofline.launch_s, f"modelled by {self.roofline.source}")
        return self._costs.get(_DISPATCH, modelled)


_NOTHING = Cost(0.0, "modelled by nothing to do")


def _is_timed(node: fx.Node) -> bool:
    return not is_view(node) and collective_of(node) is None


def _resolve(device: str, sharing: int) -> tuple[Setting, bool]:
    """The setting of a device by its type or name, and whether it is here."""
    host = Host.here()
    cuda = torch.cuda.is_available()
    here = device_name(torch.device("cuda")) if cuda else ""
    if device == "cpu":
        name, model, present = "cpu", host.cpu, True
    elif device.split(":")[0] == "cuda":
        name, model, present = here or "cuda", here or "cuda", cuda
    else:
        name, model, present = device, device, device == here
    return Setting(name, model, host.threads, sharing, host.torch), present


def _path(setting: Setting) -> Path:
    return cache_directory() / "operators" / f"{digest(asdict(setting))}.json"


def _of(kept: Any, setting: Setting) -> bool:
    """Whether a file is one of ours, of this setting."""
    return isinstance(kept, dict) and kept.get("setting") == asdict(setting) and "times" in kept


def _read(times: Mapping[str, Any]) -> dict[str, Timing]:
    return {key: Timing(**timing) for key, timing in times.items()}
