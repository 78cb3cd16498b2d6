"""NCCL's own model of its algorithms and protocols: a prior for collectives without measurements.

Reimplements `ncclTopoTuneModel`, `ncclTopoGetAlgoTime` and the choice of channels of
src/graph/tuning.cc, in its units: microseconds and GB/s (1e9 bytes/s). Errors on published tables
are 17 to 57 %, less above 16 MB (docs/cost-model.md). CollNet, which reduces in the network, is
not modelled. The channels between the ranks are an input (see `channels`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from autopar.cost_model.cost import ClusterError, Cost
from autopar.cost_model.nccl.channels import PATHS, Communicator, Graph
from autopar.cost_model.nccl.constants import (
    ALGORITHMS,
    LATEST,
    PROTOCOLS,
    TREE_CORRECTION,
    Constants,
    constants_of,
)

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")
_GATHERS = ("all_gather", "reduce_scatter")
_SIMPLE_ONLY = ("nvls", "nvls_tree", "pat")
_THREADS = {"ll": 512, "ll128": 640, "simple": 512}
_THRESHOLDS = {"ll": 8, "ll128": 8, "simple": 64}


@dataclass(frozen=True)
class Choice:
    """The combination that NCCL runs at a size, and its estimate of the time."""

    algorithm: str
    protocol: str
    channels: int
    cost: Cost


@dataclass(frozen=True)
class Tuning:
    """NCCL's model of one communicator, with the constants of one version."""

    communicator: Communicator
    constants: Constants

    @classmethod
    def of(cls, communicator: Communicator, version: str = LATEST) -> Tuning:
        return cls(communicator, constants_of(version))

    def seconds(self, collective: str, nbytes: int, algorithm: str, protocol: str) -> float | None:
        """NCCL's estimate for one combination, in seconds; None if it is not available."""
        c = self.communicator
        bandwidth = self.bandwidth(collective, algorithm, protocol)
        if bandwidth <= 0:
            return None
        latency = self.latency(collective, algorithm, protocol)
        size = (nbytes >> 6).bit_length() - 1
        if 0 <= size < self._corrected_sizes(collective, algorithm):
            bandwidth *= TREE_CORRECTION[protocol][size]
        plateau = nbytes // (c.graphs["ring"].channels * c.ranks) >= 64
        simple_ring = algorithm == "ring" and protocol == "simple"
        if simple_ring and c.nodes > 1 and collective == "all_reduce" and plateau:
            latency *= 1.9 if c.capability < 80 else 1.4
        return (latency + nbytes / (1000 * bandwidth)) * 1e-6

    def _corrected_sizes(self, collective: str, algorithm: str) -> int:
        """Number of entries of the correction table that apply."""
        if collective != "all_reduce":
            return 0
        if algorithm == "tree":
            return 23
        x86 = self.communicator.cpu in ("intel", "amd", "mixed")
        late = self.communicator.generation == "blackwell" and self.constants.nvls_tree_corrected
        return 24 if algorithm == "nvls_tree" and late and x86 else 0

    def times(self, collective: str, nbytes: int) -> dict[tuple[str, str], float]:
        """Seconds of every available combination, fastest first."""
        if collective not in COLLECTIVES:
            raise ClusterError(f"NCCL's model is of {', '.join(COLLECTIVES)}, not {collective}")
        times = {
            (a, p): seconds
            for a in ALGORITHMS
            for p in PROTOCOLS
            if (seconds := self.seconds(collective, nbytes, a, p)) is not None
        }
        return dict(sorted(times.items(), key=lambda item: item[1]))

    def pick(self, collective: str, nbytes: int) -> Choice:
        """The combination with the least estimated time."""
        times = self.times(collective, nbytes)
        algorithm, protocol = next(iter(times))
        source = f"modelled by NCCL {self.constants.name}'s tuning, {algorithm}/{protocol}"
        cost = Cost(times[algorithm, protocol], source)
        return Choice(algorithm, protocol, self.channels(nbytes, algorithm, protocol), cost)

    def channels(self, nbytes: int, algorithm: str, protocol: str) -> int:
        """Number of channels at a size: fewer where threads would have too little work."""
        c = self.communicator
        if algorithm in ("nvls", "nvls_tree"):
            return c.graphs[algorithm].channels
        threads, threshold = _THREADS[protocol], _THRESHOLDS[protocol]
        ring = c.graphs["ring"]
        if algorithm == "ring" and protocol == "simple" and ring.channels * ring.intra <= 12:
            threads = 256
        if algorithm == "ring" and protocol == "ll":
            threshold *= c.ranks
        return max(1, min(c.channels, nbytes // (threads * threshold)))

    def bandwidth(self, collective: str, algorithm: str, protocol: str) -> float:
        """Algorithm bandwidth (nccl-tests' algbw) at infinite size in GB/s; 0 if unavailable."""
        if not self._available(collective, algorithm, protocol):
            return 0.0
        c, k = self.communicator, self.constants
        if algorithm in ("nvls", "nvls_tree"):
            bus = self._nvls(collective, algorithm)
        else:
            bus = self._rings_and_trees(collective, algorithm, protocol)
        if collective in _GATHERS and algorithm != "ring":
            return bus * (5 / 6 if k.old_gathers and algorithm == "nvls" else 1)
        if algorithm == "ring" or (algorithm.startswith("nvls") and k.nvls_tree is not None):
            return bus * c.ranks / self._steps(collective)
        return bus * (5 / 6 if algorithm.startswith("nvls") else 0.5)

    def _steps(self, collective: str) -> int:
        n = self.communicator.ranks
        return {"all_reduce": 2 * (n - 1), "all_gather": n - 1, "reduce_scatter": n - 1}.get(
            collective, n
        )

    def _cap(self, caps: Mapping[str, tuple[float, float, float]]) -> float:
        return caps[self.communicator.generation][min(self.communicator.nodes, 3) - 1]

    @cached_property
    def _ll_cap(self) -> float:
        """Cap of LL's bus bandwidth in GB/s: by GPU on one node, by CPU on more."""
        c = self.communicator
        if c.nodes == 1:
            return self._cap(self.constants.ll)
        row = self.constants.ll["ampere" if c.cpu in ("amd", "mixed") else "volta"]
        return row[min(c.nodes, 3) - 1]

    def _graph(self, algorithm: str) -> Graph:
        return self.communicator.graphs["ring" if algorithm == "pat" else algorithm]

    def _rings_and_trees(self, collective: str, algorithm: str, protocol: str) -> float:
        c, k, graph = self.communicator, self.constants, self._graph(algorithm)
        bus = graph.channels * (graph.intra if c.nodes <= 2 else graph.inter)
        if algorithm == "ring" and protocol == "ll":
            copies = c.nodes == 1 and collective not in ("all_reduce", "reduce")
            bus = min(self._ll_cap, bus * k.ring_ll[copies])
        if algorithm == "ring" and protocol == "ll128":
            share = k.lone_ll128 if c.per_node == 1 else 0.92
            bus = min(bus * share, graph.channels * self._cap(k.ring_ll128))
        if algorithm == "tree":
            bus = min(0.92 * bus, graph.channels * self._cap(k.tree))
            if protocol == "ll":
                bus = min(bus / 3.8, self._ll_cap)
            if protocol == "ll128":
                share = 7 / 9 if c.nodes == 1 else 120 / 128
                bus = min(bus * share, graph.channels * self._cap(k.tree_ll128))
            bus *= 0.85 if graph.plain_tree else 1
        return bus * (k.pat or 0) if algorithm == "pat" else bus

    def _nvls(self, collective: str, algorithm: str) -> float:
        c, k, graph = self.communicator, self.constants, self._graph(algorithm)
        if k.nvls_tree is None:
            return graph.channels * self._older_nvls(collective, algorithm, graph)
        if graph.channels < 2:
            return 0.0
        intra = graph.intra * k.nvls_efficiency[c.generation] * (graph.channels - 1)
        intra /= graph.channels
        intra *= 2 if collective == "all_reduce" else (c.per_node - 1) / c.per_node
        if algorithm == "nvls":
            return graph.channels * min(intra, graph.inter)
        inter = graph.inter * (2 if c.nodes <= 2 else 1)
        return graph.channels * min(intra, inter, self._cap(k.nvls_tree))

    def _older_nvls(self, collective: str, algorithm: str, graph: Graph) -> float:
        """GB/s of a channel before NCCL 2.28."""
        c = self.communicator
        if algorithm == "nvls_tree":
            return min(graph.intra, graph.inter if c.nodes <= 2 else graph.inter / 2)
        if collective == "all_reduce" or not self.constants.nvls_gathers:
            return min(graph.intra, graph.inter)
        return min(graph.intra * (c.per_node - 1) / c.per_node, graph.inter * 0.9)

    def _available(self, collective: str, algorithm: str, protocol: str) -> bool:
        c, k = self.communicator, self.constants
        gathers = collective in _GATHERS
        reduces_all = collective == "all_reduce"
        runs = {
            "tree": reduces_all,
            "ring": True,
            "nvls": (reduces_all or gathers) and c.nodes == 1,
            "nvls_tree": reduces_all and c.nodes > 1,
            "pat": gathers and c.nodes == c.ranks and k.pat is not None and c.capability >= 60,
        }
        if not runs.get(algorithm, False):
            return False
        if ("ring" if algorithm == "pat" else algorithm) not in c.graphs:
            return False
        if algorithm in _SIMPLE_ONLY and protocol != "simple":
            return False
        return protocol != "ll128" or self._ll128(self._graph(algorithm))

    def _ll128(self, graph: Graph) -> bool:
        """Whether LL128 is on by default: stores of 128 bytes must arrive whole."""
        c, k = self.communicator, self.constants
        farthest = "PXN" if c.capability >= 90 else "PXB"
        modern = c.capability in (k.ll128_capabilities or range(70, 1000))
        near = PATHS.index(graph.path_intra) <= PATHS.index("NVB")
        return modern and near and PATHS.index(graph.path_inter) <= PATHS.index(farthest)

    def latency(self, collective: str, algorithm: str, protocol: str) -> float:
        """Microseconds of an empty message."""
        c, k, graph = self.communicator, self.constants, self._graph(algorithm)
        at = PROTOCOLS.index(protocol)
        base, intra = k.base[algorithm][at], self._hops(graph)[algorithm][at]
        inter = k.net["tree" if c.per_node == 1 and k.lone_net else algorithm][at]
        levels = c.nodes.bit_length() - 1  # floor(log2 nodes)
        if algorithm == "ring":
            return base + self._ring_latency(collective, protocol, intra, inter)
        if algorithm == "tree":
            return base + 2 * ((c.per_node - 1) * intra + levels * inter)
        if algorithm == "nvls":
            return intra
        if algorithm == "nvls_tree":
            return base + intra + 2 * levels * inter
        return base + levels * inter / 3.5 + 2.8 * c.ranks

    def _hops(self, graph: Graph) -> Mapping[str, tuple[float, float, float]]:
        """Microseconds of a hop inside a node."""
        k = self.constants
        if graph.path_intra == "NVL":
            return k.nvlink
        if self.communicator.cpu == "power":  # trees are as fast as rings there
            return {**k.pci, "tree": (*k.pci["tree"][:2], k.pci["ring"][2])}
        return k.pci

    def _ring_latency(self, collective: str, protocol: str, intra: float, inter: float) -> float:
        c, k = self.communicator, self.constants
        if collective in ("broadcast", "reduce"):
            hops = self._hops(self._graph("ring")) if c.nodes == 1 else k.net
            return hops["ring"][PROTOCOLS.index(protocol)]
        steps = self._steps(collective)
        if c.nodes == 1:
            return steps * intra
        overhead = (2.0 if c.cpu == "amd" else 1.0) * (3 if protocol == "simple" else 1)
        crossing = c.nodes - 1
        if collective == "all_reduce":
            crossing = 2 * crossing + k.inter_steps
        return (steps - crossing) * max(intra, overhead) + crossing * inter
