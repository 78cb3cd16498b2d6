"""`OperatorTimes`: time of every operator at its local shapes, measured here or modelled."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cached_property

import torch
from torch import fx

from autopar.core.ir.aliases import computes
from autopar.core.ir.graph import TrainingGraph
from autopar.core.ir.messages import collective_of, is_wait
from autopar.core.ir.signature import kind_of, moved_bytes, signature, time_key
from autopar.core.operators.kernels import is_canonical, own_kernels
from autopar.cost_model.cost import ZERO_COST, ClusterError, Cost
from autopar.cost_model.host import oversubscription, shares_cores
from autopar.cost_model.kernels.fusion import EAGER, Traffic, is_row_wise, traffic
from autopar.cost_model.kernels.gemm_efficiency import (
    is_attention,
    multiplied_bytes,
    product_of,
)
from autopar.cost_model.kernels.queue_timing import QueueTimer, time_empty_kernel
from autopar.cost_model.kernels.roofline import ROW_WISE, Roofline
from autopar.cost_model.kernels.timing import Stopwatch, flops_of, time_dispatch
from autopar.cost_model.measurement.step_replay import SINGLE_RANK, ReplayGroup, replay_step
from autopar.cost_model.measurement.timing_context import (
    Timing,
    TimingContext,
    read_times,
    resolve,
    write_times,
)

_DISPATCH = "dispatch"  # key of a call that computes nothing
_MAX_SIZE_RATIO = 16.0  # between operators of a kind that are derived from each other
_REPLAYS = 5  # runs of a graph that is replayed: one to warm up, one to count, three rounds


@dataclass(frozen=True)
class OperatorTimes:
    """Times of operators by signature.

    Attributes:
        setting: conditions of the timings.
        present: whether that device is in this machine, so that more can be timed.
        times: timing of each signature.
        alone: seconds of the calling thread, by signature, of operators timed alone in turns: they
            tell the ratio of two operators. 0 for operators that cannot be run.
        backend: backend of torch.compile, which may fuse small operators, for modelled times.
        versions: software of a GPU that is not here, for modelled times (see `Roofline.default`).
        pace: time of the slowest of all GPUs over that of a median one, for modelled products.
        traffic: memory traffic of the fused operators of one graph; see `of`.
    """

    setting: TimingContext
    present: bool
    times: Mapping[str, Timing] = field(default_factory=dict)
    alone: Mapping[str, float] = field(default_factory=dict)
    backend: str = EAGER
    versions: Mapping[str, str] = field(default_factory=dict)
    pace: float = 1.0
    traffic: Mapping[fx.Node, Traffic] = field(default_factory=dict, compare=False, repr=False)

    @property
    def on_host(self) -> bool:
        """Whether operators run on the thread that calls them."""
        return self.setting.device == "cpu"

    @property
    def absent_gpu(self) -> bool:
        """Whether all times are modelled from published figures of a GPU."""
        return not self.present and not self.on_host

    @property
    def runs_here(self) -> bool:
        """Whether operators run on the cores of this host."""
        return self.present and self.on_host

    @property
    def oversubscription(self) -> float:
        """Computing threads of all ranks for each core of this host, at least 1."""
        sharing, threads = self.setting.sharing, self.setting.threads
        return oversubscription(sharing, threads) if self.runs_here else 1.0

    @property
    def shares_cores(self) -> bool:
        """Whether ranks share cores, and CPU time tells: threads of operators have own clocks."""
        return self.runs_here and shares_cores(self.setting.sharing, self.setting.threads)

    def relief(self, ranks: int) -> float:
        """Ratio of an operator's time to its time on a free core; 1 if `ranks` span hosts."""
        return self.oversubscription if self.setting.sharing >= ranks else 1.0

    @classmethod
    def load(
        cls, device: str | torch.device, *, sharing: int = 1, runs_on: str = "cuda"
    ) -> OperatorTimes:
        """The times of this machine's cache.

        The device is "cpu", "cuda", or the name of a GPU, in this machine or not. `sharing` is the
        number of ranks on this host. A model that `runs_on` "cpu" tells nothing about a GPU, even
        where there is one.
        """
        setting, present = resolve(str(device), sharing, runs_on)
        return cls(setting, present, *read_times(setting))

    def measure(
        self,
        graphs: Sequence[TrainingGraph],
        ranks: ReplayGroup = SINGLE_RANK,
        *,
        budget_s: float = 2.0,
        limit_s: float = math.inf,
    ) -> OperatorTimes:
        """These times, with the missing operators of some lowered graphs, the same on all ranks.

        On a CPU each graph with missing operators is replayed, for `budget_s` seconds, three rounds
        at least. Otherwise, and where that fails, operators are timed one by one; on a GPU in a
        queue. All `ranks` call this. Under `limit_s` seconds, by the model's times, the quickest
        operators are timed, and others are modelled from these.
        """
        if not self.present:
            return self
        no_messages = ranks.group is None  # calls of collectives then tell nothing
        nodes = {
            time_key(node): node
            for graph in graphs
            for node in graph.calls()
            if not (no_messages and _communicates(node))
        }
        times = dict(self.times)
        today = str(date.today())

        def add(name: str, seconds: float, *, rehearsed: bool = False, host_s: float = 0.0) -> None:
            if (node := nodes.get(name)) is not None:
                size = (flops_of(node), moved_bytes(node)) if computes(node) else (0.0, 0)
                times[name] = Timing(seconds, *size, today, rehearsed, host_s)

        def missing() -> dict[str, fx.Node]:
            return {k: n for k, n in nodes.items() if k not in times and computes(n)}

        if self.on_host:
            lacking = self._missing_graphs(graphs, ranks)
            if _REPLAYS * sum(map(self._graph_s, lacking)) <= limit_s:
                shared = self.oversubscription if self.shares_cores else 1.0
                options = {"budget_s": budget_s, "ranks_per_core": shared}
                for name, seconds in replay_step(lacking, ranks, **options).items():
                    add(name, seconds, rehearsed=True)
            for name, seconds in self._timed(Stopwatch(), missing(), limit_s).items():
                add(name, seconds)
            if _DISPATCH not in times:
                times[_DISPATCH] = Timing(time_dispatch("cpu"), 0, 0, today)
        else:
            for name, timed in QueueTimer().times(missing()).items():
                add(name, timed.device_s, host_s=timed.host_s)
            if _DISPATCH not in times:
                empty_s, host_s = time_empty_kernel(), time_dispatch("cuda")
                times[_DISPATCH] = Timing(empty_s, 0, 0, today, host_s=host_s)
        return replace(self, times=times)

    def measure_alone(
        self,
        nodes: Mapping[str, fx.Node],
        ranks: ReplayGroup = SINGLE_RANK,
        *,
        budget_s: float = 0.02,
        limit_s: float = math.inf,
    ) -> OperatorTimes:
        """These times, with those of `nodes`, by their signatures, alone if some rank lacks one.

        All ranks call this at once. Each operator gets `budget_s` seconds, three runs at least.
        `limit_s` is that of `measure`.
        """
        known = not self.present or nodes.keys() <= self.alone.keys()
        if all(ranks.gather(known)):
            return self
        ranks.line_up()
        if self.on_host:
            own = self._timed(Stopwatch(budget_s, time.thread_time), nodes, limit_s)
        else:
            own = {k: timed.device_s for k, timed in QueueTimer(budget_s).times(nodes).items()}
        by_rank = ranks.gather(own)
        times = {key: [row[key] for row in by_rank if key in row] or [0.0] for key in nodes}
        means = {key: statistics.mean(row) for key, row in times.items()}
        return replace(self, alone={**self.alone, **means})

    def _graph_s(self, graph: TrainingGraph) -> float:
        return sum(self.seconds(node).seconds for node in graph.calls())

    def _timed(
        self, watch: Stopwatch, nodes: Mapping[str, fx.Node], limit_s: float
    ) -> dict[str, float]:
        """Times of operators, or of the quickest ones that can be timed within a limit."""
        if math.isinf(limit_s):
            return watch.times(nodes)
        return watch.times_within(
            nodes, {key: self.seconds(node).seconds for key, node in nodes.items()}, limit_s
        )

    def _missing_graphs(
        self, graphs: Sequence[TrainingGraph], ranks: ReplayGroup
    ) -> list[TrainingGraph]:
        """The graphs with an operator that some rank has no replayed time of."""

        def lacks(graph: TrainingGraph) -> bool:
            keys = (
                time_key(node)
                for node in graph.calls()
                if computes(node) or (ranks.group is not None and _communicates(node))
            )
            return any(key not in self.times or not self.times[key].rehearsed for key in keys)

        messages = [sum(map(_communicates, graph.calls())) for graph in graphs]
        rows = ranks.gather(([lacks(graph) for graph in graphs], messages))
        lacking, counts = zip(*rows, strict=True)
        if odd := [rank for rank, count in enumerate(counts) if count != counts[0]]:
            raise ClusterError(
                f"rank(s) {odd} are to replay programs with other collectives than rank 0, and "
                "would wait for each other forever: give every rank the same model, batch and "
                "strategy."
            )
        # Replays communicate, so a graph that one rank lacks is replayed by all.
        return [graph for graph, *flags in zip(graphs, *lacking, strict=True) if any(flags)]

    def save(self) -> None:
        """Writes the times to the cache, merged with those of other processes."""
        write_times(self.setting, self.times, self.alone)

    def of(self, graph: TrainingGraph) -> OperatorTimes:
        """These times for a graph whose operators the backend may fuse."""
        if self.backend == EAGER:
            return self
        times = replace(self, traffic=traffic(graph, self.backend))
        for name in ("_modelled_costs", "_kinds", "_costs", "_dispatch", "roofline"):
            times.__dict__[name] = getattr(self, name)  # independent of the graph
        return times

    def seconds(self, node: fx.Node) -> Cost:
        """The time of a node: measured, or modelled by the roofline.

        Views, waits and issued collectives cost the dispatch of a call. Placeholders and the
        output cost nothing.
        """
        if node.op != "call_function":
            return ZERO_COST
        if is_canonical(node):
            return self._seconds_of_attention(node)
        moved = self.traffic.get(node)
        cost = self._costs.get(time_key(node)) if moved is None else None
        if moved is not None:  # in a fused kernel
            line = self.roofline
            seconds = line.streams.seconds(moved.nbytes) + (line.launch_s if moved.first else 0.0)
            cost = Cost(seconds, f"modelled by {line.source}, small operators fused")
        if cost is None:
            if not computes(node):
                return self._dispatch
            if (key := signature(node)) not in self._modelled_costs:
                self._modelled_costs[key] = self._by_model(node)
            cost = self._modelled_costs[key]
        return cost

    def _seconds_of_attention(self, node: fx.Node) -> Cost:
        """The time of the kernels that attention becomes on the device."""
        if (key := signature(node)) not in self._modelled_costs:
            kernels = own_kernels(node, "cpu" if self.setting.device == "cpu" else "cuda")
            costs = [self.seconds(kernel) for kernel in kernels]
            longest = max(costs, key=lambda cost: cost.seconds)
            total = sum(cost.seconds for cost in costs)
            self._modelled_costs[key] = Cost(total, longest.provenance, longest.error)
        return self._modelled_costs[key]

    @cached_property
    def _modelled_costs(self) -> dict[str, Cost]:
        return {}

    def thread_cost(self, seconds: float, provenance: str) -> Cost:
        """A call that occupies the calling thread and no GPU."""
        if self.on_host:
            return Cost(seconds, provenance)
        return Cost(0.0, provenance, host_s=seconds)

    def call_of_collective(self, node: fx.Node) -> Cost | None:
        """Thread time of issuing, or waiting for, an empty collective, from replayed steps.

        Nodes that were not replayed get the mean of their kind; None if there is none.
        """
        key = time_key(node)
        timing = self.times.get(key)
        if timing is not None and timing.rehearsed:
            return self._costs[key]
        alike = self._kinds.get(kind_of(key), ())
        if not alike:
            return None
        mean = statistics.mean(seconds for _, seconds in alike)
        return Cost(mean, f"modelled by {kind_of(key)} elsewhere in replayed steps")

    def _by_model(self, node: fx.Node) -> Cost:
        """From the same operator at the nearest size, otherwise by the roofline."""
        flops, nbytes, line = flops_of(node), moved_bytes(node), self.roofline
        kind, size = kind_of(time_key(node)), flops or nbytes
        known = [timed for timed in self._kinds.get(kind, ()) if timed[0]]
        host_s = self._host_seconds.get(kind, self._host_seconds.get(_DISPATCH, 0.0))
        near = min(known, key=lambda t: abs(math.log(t[0] / max(1, size))), default=(0, 0))
        done, seconds = near
        if size and 1 / _MAX_SIZE_RATIO <= done / size <= _MAX_SIZE_RATIO:
            rest = max(0.0, seconds - line.launch_s) * size / done
            source = f"modelled by {kind} of another size, timed here"
            return Cost(line.launch_s + rest, source, host_s=host_s)
        return Cost(self.by_roofline(node), f"modelled by {line.source}", host_s=host_s)

    def by_roofline(self, node: fx.Node) -> float:
        """Seconds of an operator by the roofline alone."""
        line, flops = self.roofline, flops_of(node)
        if line.attention is not None and is_attention(node):
            product_s = line.attention.seconds(node, flops)
            return line.launch_s + max(product_s, line.streams.seconds(moved_bytes(node)))
        nbytes = moved_bytes(node) / (ROW_WISE if self.absent_gpu and is_row_wise(node) else 1.0)
        return line.seconds(flops, nbytes, multiplied_bytes(node), product_of(node))

    def share(self, part: fx.Node, whole: fx.Node) -> float:
        """Time of an operator on shards over its time on whole tensors.

        Both times have one source, alone or the roofline, so that a model's error does not favour
        a strategy.
        """
        part_s, whole_s = (self.alone.get(signature(node), 0.0) for node in (part, whole))
        if part_s and whole_s:
            return min(1.0, part_s / whole_s)
        return self.by_roofline(part) / self.by_roofline(whole)

    @cached_property
    def _kinds(self) -> dict[str, list[tuple[float, float]]]:
        """Work and seconds of all timed nodes, by operator."""
        kinds: dict[str, list[tuple[float, float]]] = {}
        for name, timing in self.times.items():
            # Calls of collectives do no work. `call_of_collective` takes the mean of their kind.
            if (size := timing.flops or timing.nbytes) or timing.rehearsed:
                kinds.setdefault(kind_of(name), []).append((size, timing.seconds))
        return kinds

    @cached_property
    def roofline(self) -> Roofline:
        """Model of operators that were not timed."""
        setting = self.setting
        line = Roofline.default(setting.device, setting.threads, self.versions, self.pace)
        if _DISPATCH not in self.times:
            return line
        timed = [(t.flops, t.nbytes, t.seconds) for t in self.times.values()]
        return line.fitted(timed, self.times[_DISPATCH].seconds)

    @cached_property
    def _costs(self) -> dict[str, Cost]:
        where = f"on {self.setting.model}, {self.setting.threads} threads"
        return {
            key: Cost(timing.seconds, f"measured {timing.day} {where}", host_s=timing.host_s)
            for key, timing in self.times.items()
        }

    @cached_property
    def _host_seconds(self) -> dict[str, float]:
        """Mean seconds of the host by operator, and of a call that computes nothing."""
        kinds: dict[str, list[float]] = {}
        for name, timing in self.times.items():
            kinds.setdefault(kind_of(name), []).append(timing.host_s)
        return {kind: statistics.mean(seconds) for kind, seconds in kinds.items()}

    @cached_property
    def _dispatch(self) -> Cost:
        launch_s = self.roofline.launch_s if self.on_host else 0.0
        cost = self._costs.get(_DISPATCH, Cost(launch_s, f"modelled by {self.roofline.source}"))
        return cost if self.on_host else replace(cost, seconds=0.0)  # no kernel


def _communicates(node: fx.Node) -> bool:
    """Whether a node issues a collective or waits for one."""
    return is_wait(node) or collective_of(node) is not None
