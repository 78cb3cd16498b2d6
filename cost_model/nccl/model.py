"""NCCL's own model of its algorithms and protocols: a prior where nothing was measured.

A reimplementation of `ncclTopoTuneModel`, `ncclTopoGetAlgoTime` and the choice of channels, in its
units: microseconds and GB/s (1e9 bytes/s). It says which algorithm and protocol NCCL would take at
a size, and how long it believes that takes. On published tables it errs by 17 to 57 %, by less
above 16 MB (docs/cost-model.md), so measured curves come first.

What NCCL's search of the machine found, its graphs, is an input (`nccl_graphs`).
"""

from __future__ import annotations

import math
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
_SIMPLE_ONLY = ("collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat")
_THREADS = {"ll": 512, "ll128": 640, "simple": 512}
_THRESHOLDS = {"ll": 8, "ll128": 8, "simple": 64}
_BATCH = 9  # collectives that one launch holds (1024 bytes of work items)


@dataclass(frozen=True)
class Choice:
    """What NCCL would run.

    Attributes:
        algorithm: one of `nccl_constants.ALGORITHMS`.
        protocol: one of `nccl_constants.PROTOCOLS`.
        channels: after NCCL has taken away those too many for the size.
        cost: how long NCCL believes that it takes.
    """

    algorithm: str
    protocol: str
    channels: int
    cost: Cost


@dataclass(frozen=True)
class Tuning:
    """NCCL's model of one communicator.

    Attributes:
        communicator: the ranks and what NCCL found between them.
        constants: of the NCCL version.
    """

    communicator: Communicator
    constants: Constants

    @classmethod
    def of(cls, communicator: Communicator, version: str = LATEST) -> Tuning:
        """The model as an NCCL version such as "2.27.5" has it."""
        return cls(communicator, constants_of(version))

    def seconds(
        self, collective: str, nbytes: int, algorithm: str, protocol: str, ops: int = 1
    ) -> float | None:
        """Seconds that NCCL believes one combination takes; None where it is not available.

        Args:
            collective: one of COLLECTIVES.
            nbytes: as `collectives` defines it.
            algorithm: one of `nccl_constants.ALGORITHMS`.
            protocol: one of `nccl_constants.PROTOCOLS`.
            ops: collectives merged into one launch.
        """
        c = self.communicator
        bandwidth = self.bandwidth(collective, algorithm, protocol)
        if bandwidth <= 0:
            return None
        latency = self.latency(collective, algorithm, protocol)
        size = (nbytes >> 6).bit_length() - 1
        if 0 <= size < self._corrected(collective, algorithm):
            bandwidth *= TREE_CORRECTION[protocol][size]
        ring = algorithm == "ring"
        plateau = nbytes // (c.graphs["ring"].channels * c.ranks) >= 64
        if ring and protocol == "simple" and c.nodes > 1 and collective == "all_reduce" and plateau:
            latency *= 1.9 if c.capability < 80 else 1.4
        launches = ops if ring else math.ceil(ops / _BATCH)
        return (latency * launches + nbytes / (1000 * bandwidth)) * 1e-6

    def _corrected(self, collective: str, algorithm: str) -> int:
        """How many entries of the correction table hold for an algorithm."""
        if collective != "all_reduce":
            return 0
        if algorithm == "tree":
            return 23
        x86 = self.communicator.cpu in ("intel", "amd", "mixed")
        late = self.communicator.generation == "blackwell" and self.constants.nvls_tree_corrected
        return 24 if algorithm == "nvls_tree" and late and x86 else 0

    def times(self, collective: str, nbytes: int, ops: int = 1) -> dict[tuple[str, str], float]:
        """Seconds of every combination that is available, fastest first."""
        if collective not in COLLECTIVES:
            raise ClusterError(f"NCCL's model is of {', '.join(COLLECTIVES)}, not {collective}")
        found = {
            (a, p): seconds
            for a in ALGORITHMS
            for p in PROTOCOLS
            if (seconds := self.seconds(collective, nbytes, a, p, ops)) is not None
        }
        return dict(sorted(found.items(), key=lambda item: item[1]))

    def pick(self, collective: str, nbytes: int, ops: int = 1, *, fp8: bool = False) -> Choice:
        """What NCCL would run: the least time, with the channels that the size deserves.

        Args:
            collective: one of COLLECTIVES.
            nbytes: as `collectives` defines it.
            ops: collectives merged into one launch.
            fp8: whether elements are 8-bit floats: then rings of more than 8 ranks are shunned.
        """
        times = self.times(collective, nbytes, ops)
        shun = fp8 and collective == "all_reduce" and self.communicator.ranks > 8

        def weight(key: tuple[str, str]) -> float:
            return times[key] * (1024 if shun and key[0] == "ring" else 1)

        algorithm, protocol = min(times, key=weight)
        version = self.constants.name
        source = f"modelled by NCCL {version}'s tuning, {algorithm}/{protocol}"
        cost = Cost(times[algorithm, protocol], source)
        return Choice(algorithm, protocol, self.channels(nbytes, algorithm, protocol), cost)

    def channels(self, nbytes: int, algorithm: str, protocol: str) -> int:
        """Channels that NCCL keeps for a size: fewer while each thread would have too little."""
        c = self.communicator
        if algorithm in ("nvls", "nvls_tree"):
            own = c.graphs[algorithm].channels
            return min(own, c.channels) if c.nodes > 1 and algorithm == "nvls" else own
        threads, threshold = _THREADS[protocol], _THRESHOLDS[protocol]
        ring = c.graphs["ring"]
        if algorithm == "ring" and protocol == "simple" and ring.channels * ring.intra <= 12:
            threads = 256
        if algorithm == "ring" and protocol == "ll":
            threshold *= c.ranks
        if algorithm.startswith("collnet"):
            threads, threshold = 640, 512 * (c.collnet_heads if algorithm.endswith("ct") else 1)
        return max(1, min(c.channels, nbytes // (threads * threshold)))

    # -- bandwidth -----------------------------------------------------------------------------

    def bandwidth(self, collective: str, algorithm: str, protocol: str) -> float:
        """GB/s of the message (nccl-tests' algbw) at infinite size; 0 where not available."""
        if not self._available(collective, algorithm, protocol):
            return 0.0
        c, k = self.communicator, self.constants
        if algorithm in ("nvls", "nvls_tree"):
            bus = self._nvls(collective, algorithm)
        elif algorithm == "collnet_direct":
            bus = self._collnet_direct(collective)
        else:
            bus = self._rings_and_trees(collective, algorithm, protocol)
        if collective in _GATHERS and algorithm != "ring":
            old_nvls = k.old_gathers and algorithm == "nvls"
            return bus * (5 / 6 if old_nvls else 1)
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
        """One node: by GPU. More: by CPU."""
        c = self.communicator
        if c.nodes == 1:
            return self._cap(self.constants.ll)
        row = self.constants.ll["ampere" if c.cpu in ("amd", "mixed") else "volta"]
        return row[min(c.nodes, 3) - 1]

    def _graph(self, algorithm: str) -> Graph:
        return self.communicator.graphs["ring" if algorithm == "pat" else algorithm]

    def _rings_and_trees(self, collective: str, algorithm: str, protocol: str) -> float:
        c, k, graph = self.communicator, self.constants, self._graph(algorithm)
        within = c.nodes <= 2 or algorithm == "collnet_chain"
        bus = graph.channels * (graph.intra if within else graph.inter)
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
        """GB/s a channel, before 2.28."""
        c = self.communicator
        if algorithm == "nvls_tree":
            return min(graph.intra, graph.inter if c.nodes <= 2 else graph.inter / 2)
        if collective == "all_reduce" or not self.constants.nvls_gathers:
            return min(graph.intra, graph.inter)
        return min(graph.intra * (c.per_node - 1) / c.per_node, graph.inter * 0.9)

    def _collnet_direct(self, collective: str) -> float:
        c, graph = self.communicator, self._graph("collnet_direct")
        if collective in _GATHERS:
            if not self.constants.old_gathers:
                return c.per_node * min(graph.intra, 0.9 * graph.inter)
            weight = (c.per_node - 1) / 7
            return c.per_node * graph.intra * (weight * 0.85 + (1 - weight) * 0.95)
        share = c.per_node / graph.channels  # devices per NIC
        share -= (share - 1) / 2
        return graph.channels * graph.intra / share * (0.85 if c.capability >= 90 else 1)

    def _available(self, collective: str, algorithm: str, protocol: str) -> bool:
        c, k = self.communicator, self.constants
        gathers = collective in _GATHERS
        serves = {
            "tree": collective == "all_reduce",
            "ring": True,
            "collnet_direct": (collective == "all_reduce" or gathers) and c.nvswitch,
            "collnet_chain": collective == "all_reduce",
            "nvls": collective == "all_reduce" or gathers,
            "nvls_tree": collective == "all_reduce" and c.nodes > 1,
            "pat": gathers and c.nodes == c.ranks and k.pat is not None and c.capability >= 60,
        }
        if not serves[algorithm] or ("ring" if algorithm == "pat" else algorithm) not in c.graphs:
            return False
        if algorithm in _SIMPLE_ONLY and protocol != "simple":
            return False
        in_network = algorithm.startswith("collnet") or (algorithm == "nvls" and c.nodes > 1)
        if in_network and not c.collnet_heads:
            return False
        if in_network and gathers and c.nodes > 1:
            return c.collnet_gathers and c.per_node <= c.collnet_heads
        return protocol != "ll128" or self._ll128(self._graph(algorithm))

    def _ll128(self, graph: Graph) -> bool:
        """Whether LL128 is on by default: where stores of 128 bytes are known to arrive whole."""
        c, k = self.communicator, self.constants
        if c.unlike and c.capability >= 90 and k.mixed_ll128 is None:
            raise ClusterError(f"whether NCCL {k.name} uses LL128 between unlike GPUs is not known")
        alike = not c.unlike or bool(k.mixed_ll128 and c.capability >= 90)
        far = "PXN" if c.capability >= 90 else "PXB"
        modern = c.capability in (k.ll128_capabilities or range(70, 1000))
        near = PATHS.index(graph.path_intra) <= PATHS.index("NVB")
        return alike and modern and near and PATHS.index(graph.path_inter) <= PATHS.index(far)

    # -- latency -------------------------------------------------------------------------------

    def latency(self, collective: str, algorithm: str, protocol: str) -> float:
        """Microseconds of an empty message."""
        c, k, graph = self.communicator, self.constants, self._graph(algorithm)
        at = PROTOCOLS.index(protocol)
        base = k.base[algorithm][at]
        hardware = self._hardware(graph)
        intra, lone = hardware[algorithm][at], c.per_node == 1 and k.lone_net
        inter = k.net["tree" if lone else algorithm][at] + graph.latency_us
        inter += graph.latency_us if protocol == "simple" else 0
        levels = c.nodes.bit_length() - 1  # floor(log2 nodes)
        local = c.per_node - 1
        if algorithm == "ring":
            return base + self._ring_latency(collective, protocol, intra, inter)
        if algorithm == "tree":
            return base + 2 * (local * intra + levels * inter)
        if algorithm == "collnet_direct":
            return base + 2 * (min(1, local) * intra + 0.4 * local) + inter
        if algorithm == "collnet_chain":
            return base + 2 * local * intra + inter
        if algorithm == "nvls":
            return intra + (inter if c.nodes > 1 else 0)
        if algorithm == "nvls_tree":
            return base + intra + 2 * levels * inter
        return base + levels * inter / 3.5 + 2.8 * c.ranks

    def _hardware(self, graph: Graph) -> Mapping[str, tuple[float, float, float]]:
        k = self.constants
        if graph.path_intra == "NVL":
            return k.nvlink
        if self.communicator.cpu == "power":  # trees are not held back there
            return {**k.pci, "tree": (*k.pci["tree"][:2], k.pci["ring"][2])}
        return k.pci

    def _ring_latency(self, collective: str, protocol: str, intra: float, inter: float) -> float:
        c, k, graph = self.communicator, self.constants, self._graph("ring")
        steps = self._steps(collective)
        if collective in ("broadcast", "reduce"):
            hops = self._hardware(graph) if c.nodes == 1 else k.net
            at = PROTOCOLS.index(protocol)
            if graph.same_channels:
                return hops["ring"][at]
            return steps * hops["tree" if protocol == "simple" else "ring"][at]
        if c.nodes == 1:
            return steps * intra
        overhead = c.net_overhead_us
        if overhead is None:
            overhead = 2.0 if c.cpu == "amd" else 1.0
        overhead *= 3 if protocol == "simple" else 1
        crossing = c.nodes - 1
        if collective == "all_reduce":
            crossing = 2 * crossing + k.inter_steps
        return (steps - crossing) * max(intra, overhead) + crossing * inter
