"""NCCL's tuning constants, one frozen table per range of versions.

Latencies are in microseconds and bandwidths in GB/s (1e9 bytes/s), as in NCCL. Sources:
src/graph/tuning.cc of NCCL 2.20.3, 2.21.5, 2.27, 2.28.3 and 2.30 (BSD licence; the figures, not
the code), and the release history for changes between them. Versions with unknown changes are
refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.cost_model.cost import ClusterError

ALGORITHMS = ("tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat")
PROTOCOLS = ("ll", "ll128", "simple")
GENERATIONS = ("volta", "ampere", "hopper", "blackwell")

Latencies = Mapping[str, tuple[float, float, float]]
"""Algorithm -> microseconds under LL, LL128, Simple."""
Caps = Mapping[str, tuple[float, float, float]]
"""Generation -> GB/s on one node, two nodes, more."""


@dataclass(frozen=True)
class Constants:
    """The constants of one range of NCCL versions.

    Attributes:
        since: first version of the range.
        base: latency of a launch.
        nvlink: latency of a hop over NVLink.
        pci: latency of a hop over PCIe.
        net: latency of a hop over the network.
        ll: cap of the LL protocol's bus bandwidth.
        ring_ll128: cap per channel of rings under LL128.
        tree_ll128: cap per channel of trees under LL128.
        tree: cap per channel of trees.
        nvls_tree: cap per channel of NVLS trees; None under the NVLS model before 2.28.
        nvls_efficiency: share of NVLink that multicast reaches, by generation.
        nvls_gathers: whether NVLS all-gather and reduce-scatter are capped at (ppn - 1) / ppn.
        ring_ll: factors of LL on a ring: of collectives that reduce, and of those that copy.
        lone_ll128: factor of LL128 on a ring with one rank a node.
        pat: factor of PAT; None before there was PAT.
        inter_steps: extra network steps of a ring all-reduce (2 before 2.23: 2N, not 2N-2).
        lone_net: whether one rank a node pays the tree's network latency in every algorithm.
        nvls_tree_corrected: whether the tree's corrections apply to NVLS trees on x86 Blackwell.
        ll128_capabilities: compute capabilities with LL128; None for all from 70.
        old_gathers: whether all-gather and reduce-scatter follow the rules before 2.23.
    """

    since: tuple[int, ...]
    base: Latencies
    nvlink: Latencies
    pci: Latencies
    net: Latencies
    ll: Caps
    ring_ll128: Caps
    tree_ll128: Caps
    tree: Caps
    nvls_tree: Caps | None
    nvls_efficiency: Mapping[str, float]
    nvls_gathers: bool = True
    ring_ll: tuple[float, float] = (0.5, 0.5)
    lone_ll128: float = 0.92
    pat: float | None = 0.75
    inter_steps: int = 0
    lone_net: bool = True
    nvls_tree_corrected: bool = True
    ll128_capabilities: tuple[int, ...] | None = None
    old_gathers: bool = False

    @property
    def name(self) -> str:
        """The first version of the range: "2.30.3"."""
        return ".".join(map(str, self.since))


def _latencies(
    tree: tuple[float, float, float],
    ring: tuple[float, float, float],
    *simple: float,
    pat: tuple[float, float, float],
) -> Latencies:
    """Tree and ring, then Simple alone of CollNet direct, chain, NVLS and NVLS tree, then PAT."""
    others = {name: (0.0, 0.0, s) for name, s in zip(ALGORITHMS[2:6], simple, strict=True)}
    return {"tree": tree, "ring": ring, **others, "pat": pat}


def _caps(*rows: tuple[float, float, float]) -> Caps:
    return dict(zip(GENERATIONS, rows, strict=True))


def _twice(caps: Caps) -> Caps:
    first, middle, last = caps["hopper"]
    return {**caps, "blackwell": (2 * first, 2 * middle, 2 * last)}


_V = _A = (20.0, 20.0, 20.0)
_PAT_HOP = (0.0, 0.0, 4.0)
_NVLS_TREE = _caps((26.5, 18.5, 10), (24, 23.6, 17.8), (0, 57.7, 45.5), (0, 96, 80))

_V2_30_3 = Constants(
    since=(2, 30, 3),
    base=_latencies((6.8, 14, 8.4), (6.6, 14, 8.4), 0, 0, 0, 0, pat=(8, 8, 8)),
    nvlink=_latencies((0.6, 1.25, 4), (0.6, 1.9, 3.4), 3.7, 2.8, 25, 25, pat=_PAT_HOP),
    pci=_latencies((1, 1.9, 4), (1, 2.5, 5.7), 3.7, 2.8, 0, 0, pat=_PAT_HOP),
    net=_latencies((5, 8.5, 14), (2.7, 4, 14), 31, 30, 18, 20.9, pat=(0.0, 0.0, 14.0)),
    ll=_caps((39, 39, 20.4), (87.7, 22.5, 19), (141, 45, 35), (282, 90, 70)),
    ring_ll128=_caps(_V, _A, (36.7, 36.7, 36.7), (40, 40, 40)),
    tree_ll128=_caps(_V, _A, (36.7, 36.7, 29), (55.6, 31.67, 20)),
    tree=_caps((26.5, 18.5, 10), (24, 23.6, 17.8), (38.7, 41.4, 36), (70, 42.8, 24)),
    nvls_tree=_NVLS_TREE,
    nvls_efficiency={"volta": 0, "ampere": 0, "hopper": 0.85, "blackwell": 0.74},
)


def _blackwell_ring(value: float) -> Caps:
    return {**_V2_30_3.ring_ll128, "blackwell": (value, value, value)}


_V2_29_7 = replace(_V2_30_3, since=(2, 29, 7), nvls_tree={**_NVLS_TREE, "blackwell": (0, 96, 43.8)})
_V2_29_2 = replace(_V2_29_7, since=(2, 29, 2), ring_ll128=_blackwell_ring(34.5))
_V2_28_9 = replace(
    _V2_29_2, since=(2, 28, 9), ring_ll128=_blackwell_ring(34.6), nvls_tree_corrected=False
)
_V2_28_3 = replace(
    _V2_28_9,
    since=(2, 28, 3),
    net={**_V2_28_9.net, "nvls_tree": (0.0, 0.0, 14.0)},
    ring_ll128=_blackwell_ring(73.4),
    nvls_tree={**_NVLS_TREE, "blackwell": (0, 96, 43.1)},
)
_V2_27 = replace(
    _V2_28_3,
    since=(2, 27),
    tree_ll128=_twice(_V2_28_3.tree_ll128),
    tree=_twice(_V2_28_3.tree),
    nvls_tree=None,
)
_V2_25_1 = replace(_V2_27, since=(2, 25, 1), nvls_gathers=False)
_V2_21_5 = replace(
    _V2_25_1,
    since=(2, 21, 5),
    base={**_V2_25_1.base, "tree": (6.8, 14.0, 0.0)},
    nvlink={**_V2_25_1.nvlink, "tree": (0.6, 1.25, 28.0)},
    pci={**_V2_25_1.pci, "tree": (1.0, 1.9, 28.0)},
    net={**_V2_25_1.net, "tree": (5.0, 8.5, 28.0)},
    lone_ll128=0.7,
    pat=None,
    inter_steps=2,
    lone_net=False,
    ll128_capabilities=(70, 80, 90),
    old_gathers=True,
)
_V2_19_4 = replace(
    _V2_21_5,
    since=(2, 19, 4),
    nvlink={**_V2_21_5.nvlink, "nvls": (0.0, 0.0, 23.0), "nvls_tree": (0.0, 0.0, 23.0)},
    ll={**_V2_21_5.ll, "hopper": _V2_21_5.ll["ampere"]},
    ring_ll=(0.25, 1 / 3),
)

_TABLES: tuple[tuple[Constants, tuple[int, ...]], ...] = (
    (_V2_30_3, (2, 31)),
    (_V2_29_7, (2, 30, 3)),
    (_V2_29_2, (2, 29, 7)),
    (_V2_28_9, (2, 29, 2)),
    (_V2_28_3, (2, 28, 9)),
    (_V2_27, (2, 28, 3)),
    (_V2_25_1, (2, 27)),
    (_V2_21_5, (2, 22)),
    (_V2_19_4, (2, 21, 5)),
)
"""Constants and the first version for which they no longer hold."""

LATEST = _V2_30_3.name


def constants_of(version: str) -> Constants:
    """The constants of an NCCL version such as "2.27.5" or "2.30".

    Raises:
        ClusterError: that version's constants are not known.
    """
    match = re.fullmatch(r"(?:nccl )?v?(\d+(?:\.\d+){1,3})(?:[-+].*)?", version.strip().lower())
    if match is None:
        raise ClusterError(f"{version!r} is no NCCL version such as '2.27.5'")
    numbers = tuple(map(int, match[1].split(".")))
    if len(numbers) == 2:  # a whole series: its last known release
        numbers = (*numbers, 10**6)
    for table, end in _TABLES:
        if table.since <= numbers < end:
            return table
    known = ", ".join(f"{table.name} to before {'.'.join(map(str, end))}" for table, end in _TABLES)
    raise ClusterError(
        f"the tuning constants of NCCL {version} are not known, only those of {known}: "
        f"measure, or name the nearest of these knowing that it errs"
    )


TREE_CORRECTION: Mapping[str, tuple[float, ...]] = {
    "ll": (
        *(1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5),
        *(0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.0, 1.0, 1.0, 1.0),
    ),
    "ll128": (
        *(1.0, 1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6),
        *(0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1.0, 1.0, 1.0),
    ),
    "simple": (
        *(0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5),
        *(0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9, 0.9),
    ),
}
"""Factors of a tree's bandwidth for messages of 64 B, 128 B, 256 B, ... (the same since 2.19)."""
