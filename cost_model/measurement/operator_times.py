"""`OperatorTimes`: how long every operator takes at its local shapes, timed here or modelled."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import fx

from autopar.cost_model.collectives import collective_of, is_wait
from autopar.cost_model.cost import ZERO_COST, ClusterError, Cost
from autopar.cost_model.disk_cache import (
    cache_directory,
    check_numbers,
    digest,
    read_cached,
    write_json,
)
from autopar.cost_model.host import Host, device_name
from autopar.cost_model.kernels.aliases import is_view
from autopar.cost_model.kernels.fusion import EAGER, Traffic, traffic
from autopar.cost_model.kernels.gemm_efficiency import is_attention, is_causal, product_of
from autopar.cost_model.kernels.roofline import Roofline
from autopar.cost_model.kernels.signature import kind_of, moved_bytes, signature, time_key
from autopar.cost_model.kernels.timing import Stopwatch, flops_of, time_dispatch
from autopar.cost_model.measurement.step_replay import SINGLE_RANK, ReplayGroup, replay_step
from autopar.ir.graph import TrainingGraph, tensors

_DISPATCH = "dispatch"  # the key of a call that computes nothing
_NEAR = 16.0  # by how much the sizes of two operators of a kind may differ


@dataclass(frozen=True)
class Timing:
    """One timed operator.

    Attributes:
        seconds: median of its runs.
        flops: floating-point operations, 0 but for matrix products and the like.
        nbytes: bytes read and written.
        day: when, as YYYY-MM-DD.
        rehearsed: whether inside of a step; otherwise alone.
    """

    seconds: float
    flops: float
    nbytes: int
    day: str
    rehearsed: bool = False


@dataclass(frozen=True)
class TimingContext:
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
        alone: seconds of the calling thread, by signature, of operators that were timed alone and
            in turns with each other: they tell in what proportion two stand. 0 of what cannot be
            run.
        backend: of torch.compile, which may fuse small operators, where they are modelled.
        traffic: what those of one graph then move, see `of`.
    """

    setting: TimingContext
    present: bool
    times: Mapping[str, Timing] = field(default_factory=dict)
    alone: Mapping[str, float] = field(default_factory=dict)
    backend: str = EAGER
    traffic: Mapping[fx.Node, Traffic] = field(default_factory=dict, compare=False, repr=False)

    @property
    def oversubscription(self) -> float:
        """For each core of this host, the threads that ranks compute with, where these are more."""
        here = self.present and self.setting.device == "cpu"
        wanted = self.setting.sharing * self.setting.threads
        return max(1.0, wanted / Host.here().cores) if here else 1.0

    @classmethod
    def load(cls, device: str | torch.device, *, sharing: int = 1) -> OperatorTimes:
        """What was timed before on this machine and kept on disk.

        Args:
            device: "cpu", "cuda", or the name of a GPU, in this machine or not.
            sharing: number of ranks that run on this host at once.
        """
        setting, present = _resolve(str(device), sharing)
        return cls(setting, present, *_kept(setting))

    def measure(
        self,
        graphs: Sequence[TrainingGraph],
        ranks: ReplayGroup = SINGLE_RANK,
        *,
        budget_s: float = 2.0,
        alone_s: float = 0.02,
    ) -> OperatorTimes:
        """These times and those of the operators of `graphs` that were missing.

        On a CPU each graph that has such is rehearsed. Where that is not possible, and on a GPU,
        operators are timed one by one.

        Args:
            graphs: lowered graphs, the same on all ranks.
            ranks: all of them call this at once.
            budget_s: seconds to spend on rehearsing, but three rounds at least.
            alone_s: seconds to spend on each operator otherwise, but three runs at least.
        """
        if not self.present:
            return self
        alone_here = ranks.group is None  # nothing is sent, so its calls tell nothing
        nodes = {
            time_key(node): node
            for graph in graphs
            for node in graph.calls()
            if not (alone_here and _is_sent(node))
        }
        times = dict(self.times)
        today = str(date.today())

        def keep(seconds: Mapping[str, float], rehearsed: bool) -> None:
            for name, taken in seconds.items():
                if (node := nodes.get(name)) is not None:
                    size = (flops_of(node), moved_bytes(node)) if _is_timed(node) else (0.0, 0)
                    times[name] = Timing(taken, *size, today, rehearsed)

        if self.setting.device == "cpu":
            keep(replay_step(self._unrehearsed(graphs, ranks), ranks, budget_s=budget_s), True)
        alone = {k: n for k, n in nodes.items() if k not in times and _is_timed(n)}
        keep(Stopwatch(alone_s).times(alone), False)
        if _DISPATCH not in times:
            device = "cpu" if self.setting.device == "cpu" else "cuda"
            times[_DISPATCH] = Timing(time_dispatch(device), 0, 0, today)
        return replace(self, times=times)

    def measure_alone(
        self,
        nodes: Mapping[str, fx.Node],
        ranks: ReplayGroup = SINGLE_RANK,
        *,
        budget_s: float = 0.02,
    ) -> OperatorTimes:
        """These times and those of `nodes` alone, if one of them was missing on some rank.

        Args:
            nodes: operators by their signatures.
            ranks: all of them call this at once.
            budget_s: seconds to spend on each operator, but three runs at least.
        """
        known = not self.present or nodes.keys() <= self.alone.keys()
        if all(ranks.gather(known)):
            return self
        ranks.line_up()
        timed = ranks.gather(Stopwatch(budget_s, time.thread_time).times(nodes))
        found = {key: [times[key] for times in timed if key in times] or [0.0] for key in nodes}
        means = {key: statistics.mean(times) for key, times in found.items()}
        return replace(self, alone={**self.alone, **means})

    def _unrehearsed(
        self, graphs: Sequence[TrainingGraph], ranks: ReplayGroup
    ) -> list[TrainingGraph]:
        """The graphs with an operator that some rank does not know from a rehearsal."""

        def lacks(graph: TrainingGraph) -> bool:
            known = self.times
            timed = (
                time_key(node)
                for node in graph.calls()
                if _is_timed(node) or (ranks.group is not None and _is_sent(node))
            )
            return any(key not in known or not known[key].rehearsed for key in timed)

        sends = [sum(map(_is_sent, graph.calls())) for graph in graphs]
        rows = ranks.gather(([lacks(graph) for graph in graphs], sends))
        flags, counts = zip(*rows, strict=True)
        if odd := [rank for rank, count in enumerate(counts) if count != counts[0]]:
            raise ClusterError(
                f"rank(s) {odd} are to rehearse programs with other collectives than rank 0, and "
                "would wait for each other forever: give every rank the same model, batch and "
                "strategy."
            )
        return [graph for graph, *lacking in zip(graphs, *flags, strict=True) if any(lacking)]

    def merged(self, other: OperatorTimes) -> OperatorTimes:
        """These times and the other's; where both have one, the other's."""
        if other.setting != self.setting:
            raise ClusterError(f"operators timed under {other.setting} are not of {self.setting}")
        times, alone = {**self.times, **other.times}, {**self.alone, **other.alone}
        return replace(self, times=times, alone=alone)

    def save(self) -> None:
        """Keep the times on disk, with those that other processes have kept meanwhile."""
        times, alone = _kept(self.setting)
        now = {
            "setting": asdict(self.setting),
            "times": {key: asdict(timing) for key, timing in {**times, **self.times}.items()},
            "alone": {**alone, **self.alone},
        }
        write_json(_path(self.setting), now)

    def of(self, graph: TrainingGraph) -> OperatorTimes:
        """These times as the operators of a graph have them, which may be fused with others."""
        if self.present or self.backend == EAGER:
            return self
        made = replace(self, traffic=traffic(graph, self.backend))
        for name in ("_known", "_kinds", "_costs", "_dispatch", "roofline"):
            made.__dict__[name] = getattr(self, name)  # nothing of these is of a graph
        return made

    def seconds(self, node: fx.Node) -> Cost:
        """The time of a node: measured if it was timed, otherwise modelled by the roofline.

        Views, waits and the issuing of collectives cost the dispatch of a call; placeholders and
        the output nothing.
        """
        if node.op != "call_function":
            return ZERO_COST
        cost = self._costs.get(time_key(node))
        if cost is None and node in self.traffic:
            cost = self._in_kernel(self.traffic[node])
        if cost is None:
            cost = self._modelled(node) if _is_timed(node) else self._dispatch
        return cost

    def _modelled(self, node: fx.Node) -> Cost:
        """What a model says of a node: once of all that are alike."""
        key = signature(node)
        if key not in self._known:
            self._known[key] = self._by_model(node)
        return self._known[key]

    @cached_property
    def _known(self) -> dict[str, Cost]:
        return {}

    def _in_kernel(self, moved: Traffic) -> Cost:
        """What an operator adds to the kernel that it is part of."""
        line = self.roofline
        seconds = line.streams.seconds(moved.nbytes) + (line.launch_s if moved.first else 0.0)
        return Cost(seconds, f"modelled by {line.source}, small operators fused")

    def call_of_collective(self, node: fx.Node) -> Cost | None:
        """How long a node that issues, or waits for, an empty collective keeps its thread.

        As rehearsed; of others like it, if it was not itself; None if no such was rehearsed.
        """
        key = time_key(node)
        timing = self.times.get(key)
        if timing is not None and timing.rehearsed:
            return self._costs[key]
        alike = self._kinds.get(kind_of(key), ())
        if not alike:
            return None
        mean = statistics.mean(seconds for _, seconds in alike)
        return Cost(mean, f"modelled by {kind_of(key)} elsewhere in rehearsed steps")

    def _by_model(self, node: fx.Node) -> Cost:
        """From the same operator at the nearest size, otherwise by the roofline."""
        flops, nbytes, line = flops_of(node), moved_bytes(node), self.roofline
        kind, size = kind_of(time_key(node)), flops or nbytes
        known = [at for at in self._kinds.get(kind, ()) if at[0]]  # of nothing nothing follows
        done, taken = min(known, key=lambda at: abs(math.log(at[0] / max(1, size))), default=(0, 0))
        if size and 1 / _NEAR <= done / size <= _NEAR:
            rest = max(0.0, taken - line.launch_s) * size / done
            return Cost(line.launch_s + rest, f"modelled by {kind} of another size, timed here")
        return Cost(self.by_roofline(node), f"modelled by {line.source}")

    def by_roofline(self, node: fx.Node) -> float:
        """The seconds of an operator by the roofline alone, whatever was timed."""
        item = min((t.element_size() for t in tensors(node)), default=4)
        line, flops = self.roofline, flops_of(node)
        if line.waves is not None and is_attention(node):
            flops *= (0.5 if is_causal(node) else 1.0) * line.waves.full / line.waves.attention
        return line.seconds(flops, moved_bytes(node), item, product_of(node))

    def share(self, part: fx.Node, whole: fx.Node) -> float:
        """The time of an operator on shards by that of the whole: both alone, or by the roofline.

        Both from one source: were one timed and the other modelled, the error of the model would
        choose between ways.
        """
        alone = [self.alone.get(signature(node), 0.0) for node in (part, whole)]
        if all(alone):
            return min(1.0, alone[0] / alone[1])
        return self.by_roofline(part) / self.by_roofline(whole)

    @cached_property
    def _kinds(self) -> dict[str, list[tuple[float, float]]]:
        """Work and seconds of all that was timed, by operator."""
        found: dict[str, list[tuple[float, float]]] = {}
        for name, timing in self.times.items():
            if (size := timing.flops or timing.nbytes) or timing.rehearsed:
                found.setdefault(kind_of(name), []).append((size, timing.seconds))
        return found

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
        # on a GPU calls that start no kernel hide behind those that do
        seconds = self.roofline.launch_s if self.setting.device == "cpu" else 0.0
        modelled = Cost(seconds, f"modelled by {self.roofline.source}")
        return self._costs.get(_DISPATCH, modelled)


def _is_sent(node: fx.Node) -> bool:
    """Whether a node issues a collective or waits for one."""
    return is_wait(node) or collective_of(node) is not None


def _is_timed(node: fx.Node) -> bool:
    return not is_view(node) and collective_of(node) is None


def _resolve(device: str, sharing: int) -> tuple[TimingContext, bool]:
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
    return TimingContext(name, model, host.threads, sharing, host.torch), present


def _path(setting: TimingContext) -> Path:
    return cache_directory() / "operators" / f"{digest(asdict(setting))}.json"


def _kept(setting: TimingContext) -> tuple[dict[str, Timing], dict[str, float]]:
    """The times on disk, and those of operators alone; none where the setting was another."""

    def parse(data: Any) -> tuple[dict[str, Timing], dict[str, float]]:
        if data["setting"] != asdict(setting):
            return {}, {}
        times = {key: _timing(fields) for key, fields in data["times"].items()}
        return times, check_numbers(data.get("alone", {}))

    return read_cached(_path(setting), parse) or ({}, {})


def _timing(fields: Mapping[str, Any]) -> Timing:
    """One timing as it is kept."""
    check_numbers({name: fields[name] for name in ("seconds", "flops", "nbytes")})
    return Timing(**fields)
