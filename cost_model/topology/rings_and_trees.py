"""Rings and trees found on the graph of a cluster, and the links that limit them.

A message between two devices takes the path with the fewest links, the widest of these, and never
goes through another device. All messages of a step are under way at once, so a link that several
of them take is shared: the rate of a ring is the least of capacity / load over its links.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, permutations

import networkx as nx

from autopar.cost_model.cost import ClusterError
from autopar.cost_model.topology.topology import by_node, node_of

Link = tuple[str, str]
"""One direction of a link: (from, to)."""
Path = tuple[Link, ...]
"""The links that a message takes, one after the other."""

EXACT = 8
"""Up to so many devices every order of a ring is tried."""
_SEARCHED = 64
"""Up to so many devices an order is improved by exchanges."""


@dataclass(frozen=True)
class Ring:
    """An order of devices, each of which sends to the next, and the last to the first.

    Attributes:
        order: the devices.
        bytes_per_s: bytes per second that every device can send to the next, all at once.
        bottleneck: the link that limits them.
        paths: the links of each hop, from each device to the next.
        exact: whether no other order is faster; otherwise it is the best that a search found.
    """

    order: tuple[str, ...]
    bytes_per_s: float
    bottleneck: Link
    paths: tuple[Path, ...]
    exact: bool

    @property
    def hops(self) -> tuple[Link, ...]:
        """Sender and receiver of each message of a step."""
        return tuple(zip(self.order, (*self.order[1:], self.order[0]), strict=True))


class Routes:
    """Paths between the devices of a graph, and how much of each link is still free."""

    def __init__(self, graph: nx.Graph) -> None:
        """Start with every link free."""
        self.graph = graph
        self._kind: dict[str, str] = dict(graph.nodes(data="kind"))
        self._width = {
            link: float(width)
            for a, b, width in graph.edges(data="bytes_per_s")
            for link in ((a, b), (b, a))
        }
        self._free = dict(self._width)
        self._ways: dict[Link, list[Path]] = {}
        self._paths: dict[Link, Path] = {}

    def path(self, source: str, target: str) -> Path:
        """The links from one device to another: of the shortest ways the widest.

        Raises:
            ClusterError: nothing links them.
        """
        found = self._paths.get((source, target))
        if found is None:
            if node_of(source) == node_of(target):
                found = self._widest(source, target)
            else:
                back = self._widest(target, "fabric", reverse=True)
                found = self._widest(source, "fabric") + tuple((b, a) for a, b in back[::-1])
            self._paths[source, target] = found
        return found

    def _widest(self, source: str, target: str, *, reverse: bool = False) -> Path:
        """Of the shortest ways inside the machine of `source` the one with most room."""
        ways = self._ways.get((source, target))
        if ways is None:
            ways = self._ways[source, target] = self._shortest(source, target)

        def room(way: Path) -> float:
            return min(self._free[(b, a) if reverse else (a, b)] for a, b in way)

        return max(ways, key=room)

    def _shortest(self, source: str, target: str) -> list[Path]:
        barred = ("device",) if target == "fabric" else ("device", "nic", "fabric")
        machine, ways, seen = node_of(source), [[source]], {source}
        while ways:
            done = [tuple(pairwise(way)) for way in ways if way[-1] == target]
            if done:
                return done
            ways = [
                [*way, name]
                for way in ways
                for name in self.graph[way[-1]]
                if name == target
                or (
                    name not in seen and node_of(name) == machine and self._kind[name] not in barred
                )
            ]
            seen |= {way[-1] for way in ways}
        raise ClusterError(f"topology: nothing links {source} to {target}")

    def latency(self, source: str, target: str) -> float:
        """Seconds that an empty message takes from one device to another."""
        return sum(self.graph.edges[link]["latency_s"] for link in self.path(source, target))

    def loads(self, hops: Iterable[Link], weight: float = 1.0) -> Counter[Link]:
        """How much passes over each link while each hop carries `weight`."""
        total: Counter[Link] = Counter()
        for hop in hops:
            for link in self.path(*hop):
                total[link] += weight  # type: ignore[assignment]
        return total

    def rate(self, loads: Mapping[Link, float]) -> tuple[float, Link]:
        """The most that the free links let pass for each unit of load, and the link that limits."""
        return min((self._free[link] / load, link) for link, load in loads.items())

    def rings(self, devices: Sequence[str], most: int = 32) -> tuple[Ring, ...]:
        """Rings that run at once: the fastest, then the fastest over what it leaves, and so on.

        A ring and its reverse use the two directions of the same links, so a mesh of NVLinks yields
        both. Rings slower than half of the first are left out, such as those over PCIe beside
        NVLink.
        """
        found: list[Ring] = []
        while len(found) < most:
            ring = self.ring(devices)
            if found and ring.bytes_per_s < 0.5 * found[0].bytes_per_s:
                break
            found.append(ring)
            for link in chain.from_iterable(ring.paths):
                self._free[link] = max(0.0, self._free[link] - ring.bytes_per_s)
            self._paths.clear()  # of ways equally short, another may have the most room now
        self._free |= {link: self._width[link] for r in found for way in r.paths for link in way}
        self._paths.clear()
        return tuple(found)

    def ring(self, devices: Sequence[str]) -> Ring:
        """The fastest ring through all the devices over what is free.

        Exact up to EXACT devices, and where no order can be faster because every device, or a
        whole machine, already sends all that it can. Beyond that, machine by machine, the devices
        of each as on its own best ring, rotated so that each ring enters and leaves by other NICs,
        then improved by reversing stretches.
        """
        if len(devices) < 2:
            raise ClusterError("a ring needs two devices")
        best = max(self._rotations(devices), key=self._merit)
        bound = self._bound(devices)
        if self._merit(best)[0] >= bound * (1 - 1e-9):
            return self._as_ring(best, exact=True)
        if len(devices) <= EXACT:
            return self._as_ring(self._best_of_all(devices, best), exact=True)
        if len(devices) <= _SEARCHED:
            best = self._improved(best)
        return self._as_ring(best, exact=False)

    def _rotations(self, devices: Sequence[str]) -> list[tuple[str, ...]]:
        """Machine by machine, the devices of every machine rotated by the same number."""
        machines = list(by_node(devices).values())
        if len(machines) == 1:
            return [tuple(devices)]
        own = [self.ring(part).order if len(part) > 2 else part for part in machines]
        return [
            tuple(d for part in own for d in (*part[turn % len(part) :], *part[: turn % len(part)]))
            for turn in range(max(map(len, own)))
        ]

    def _as_ring(self, order: Sequence[str], *, exact: bool) -> Ring:
        hops = tuple(zip(order, (*order[1:], order[0]), strict=True))
        rate, bottleneck = self.rate(self.loads(hops))
        paths = tuple(self.path(*hop) for hop in hops)
        return Ring(tuple(order), rate, bottleneck, paths, exact)

    def _merit(self, order: Sequence[str]) -> tuple[float, ...]:
        """The rates of the hops, slowest first: what a search makes as large as it can."""
        hops = tuple(zip(order, (*order[1:], order[0]), strict=True))
        try:
            loads = self.loads(hops)
        except ClusterError:
            return (-1.0,)
        return tuple(
            sorted(min(self._free[link] / loads[link] for link in self.path(*hop)) for hop in hops)
        )

    def _bound(self, devices: Sequence[str]) -> float:
        """No ring is faster: what the poorest device can send or receive over its widest link."""

        def widest(links: Iterable[Link]) -> float:
            return max((self._free[link] for link in links), default=0.0)

        bounds = []
        for d in devices:
            beside = list(self.graph[d])
            bounds += [widest((d, n) for n in beside), widest((n, d) for n in beside)]
        machines = by_node(devices)
        if len(machines) > 1:
            nics = by_node(list(self.graph.adj.get("fabric", ())))
            for machine in machines:
                out = [(nic, "fabric") for nic in nics.get(machine, ())]
                bounds += [widest(out), widest((b, a) for a, b in out)]
        return min(bounds)

    def _best_of_all(self, devices: Sequence[str], known: tuple[str, ...]) -> tuple[str, ...]:
        """Every order, but for those with a hop that is no faster than a ring already found."""
        widths: dict[Link, float] = {}
        for hop in permutations(devices, 2):
            try:
                widths[hop] = min(self._free[link] for link in self.path(*hop))
            except ClusterError:
                continue
        best, merit = known, self._merit(known)

        def extend(order: tuple[str, ...], rest: frozenset[str]) -> None:
            nonlocal best, merit
            if not rest:
                if self._merit(order) > merit:
                    best, merit = order, self._merit(order)
                return
            for device in sorted(rest, key=lambda d: -widths.get((order[-1], d), -1.0)):
                if widths.get((order[-1], device), -1.0) > merit[0]:
                    extend((*order, device), rest - {device})

        extend((devices[0],), frozenset(devices[1:]))
        return best

    def _improved(self, order: Sequence[str]) -> tuple[str, ...]:
        """2-opt: reverse stretches as long as that makes the slowest hops faster."""
        best, merit = tuple(order), self._merit(order)
        found = True
        while found:
            found = False
            for i in range(1, len(best)):
                for j in range(i + 2, len(best) + 1):
                    other = (*best[:i], *reversed(best[i:j]), *best[j:])
                    if self._merit(other) > merit:
                        best, merit, found = other, self._merit(other), True
        return best


@dataclass(frozen=True)
class Tree:
    """Two trees, each of which carries half of every message (NCCL 2.4; Sanders et al. 2009).

    Attributes:
        parents: for each of the two, the parent of every device but the root.
        bytes_per_s: bytes of the message per second, up and down both trees at once.
        bottleneck: the link that limits them.
    """

    parents: tuple[Mapping[str, str], Mapping[str, str]]
    bytes_per_s: float
    bottleneck: Link


def tree(graph: nx.Graph, devices: Sequence[str]) -> Tree:
    """A double binary tree over the machines, a chain inside each.

    The devices of each machine follow one another as on the best ring; the first tree enters a
    machine at one end of the chain, the second at the other, so that they use two NICs. On one
    machine the trees are over the devices themselves.
    """
    routes = Routes(graph)
    chains = list(by_node(routes.ring(devices).order).values())
    if len(chains) == 1:
        chains = [[device] for device in chains[0]]
    parents = []
    for index, links in enumerate(double_tree(len(chains))):
        turned = [chain[::-1] if index else chain for chain in chains]
        parent = {turned[child][0]: turned[up][0] for child, up in links.items()}
        parent |= {after: before for chain in turned for before, after in pairwise(chain)}
        parents.append(parent)
    hops = [hop for parent in parents for c, p in parent.items() for hop in ((c, p), (p, c))]
    rate, bottleneck = routes.rate(routes.loads(hops, 0.5))
    return Tree((parents[0], parents[1]), rate, bottleneck)


def double_tree(count: int) -> tuple[dict[int, int], dict[int, int]]:
    """Two binary trees over 0..count-1 in which no one has children in both, if count is even.

    The first hangs odd numbers as leaves below even ones; the second is its mirror image, or, for
    an odd count, is shifted by one (Sanders, Speck & Träff 2009, as NCCL 2.4 builds it).

    Returns:
        The parent of each member but the root, for either tree.
    """
    first = {rank: _parent(rank, count) for rank in range(1, count)}
    if count % 2:
        second = {(r + 1) % count: (up + 1) % count for r, up in first.items()}
    else:
        second = {count - 1 - r: count - 1 - up for r, up in first.items()}
    return first, second


def _parent(rank: int, count: int) -> int:
    """Clear the lowest bit and set the next; only clear it where that would be out of bounds."""
    bit = rank & -rank
    up = (rank ^ bit) | (bit << 1)
    return up if up < count else rank ^ bit
