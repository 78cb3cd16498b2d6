"""Relations between prices of any two messages, over shipped clusters and random sizes."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import networkx as nx
import pytest

from autopar.core.ir.messages import FROM_HOST, TO_HOST
from autopar.cost_model.algorithms.wire_bytes import leaving
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.collectives import COLLECTIVES, Link, ring
from autopar.cost_model.curves.curve import Curve
from autopar.cost_model.group_shape import GroupShape
from autopar.cost_model.storage import copies_over
from autopar.planner.evaluate.bandwidth_sweep import ScaledBandwidth
from tests.cost_model.machines import every_machine

CLUSTERS = ("aws-p5", "dgx-a100", "dgx-b200", "dgx-h100", "gcp-a3mega")
TUNED = 1.15
"""Ratio by which NCCL's tuner takes longer for fewer bytes, where it changes its protocol."""
EXACT = 1.0 + 1e-9

each_cluster = pytest.mark.parametrize("name", CLUSTERS)


def cluster_of(name: str) -> Cluster:
    return Cluster.named(name, 4)


def shapes(cluster: Cluster) -> list[GroupShape]:
    """Groups inside a node, across nodes, and several at once."""
    node = cluster.ranks_per_node
    return [
        GroupShape(node, node),
        GroupShape(2, 2, node // 2),
        GroupShape(2 * node, node),
        GroupShape(4, 1, node),
        GroupShape(4 * node, node),
    ]


def questions(name: str, count: int = 40) -> Iterator[tuple[Cluster, str, float, GroupShape]]:
    """Random messages on a cluster: collective, bytes and groups."""
    draw, cluster = random.Random(name), cluster_of(name)
    for _ in range(count):
        kind = draw.choice(COLLECTIVES)
        yield cluster, kind, 2 ** draw.uniform(8, 31), draw.choice(shapes(cluster))


@each_cluster
def test_more_bytes_are_never_quicker(name: str) -> None:
    """By the tuner's own steps for four times the bytes, and at all for 64 times."""
    for cluster, kind, nbytes, shape in questions(name):
        seconds = [cluster.seconds(kind, n * nbytes, shape).seconds for n in (1, 4, 64)]
        assert seconds[0] <= TUNED * seconds[1]
        assert seconds[0] <= EXACT * seconds[2]


@each_cluster
def test_one_message_is_never_slower_than_its_halves(name: str) -> None:
    """Bytes that go together pay latency once."""
    for cluster, kind, nbytes, shape in questions(name):
        half, whole = (cluster.seconds(kind, n * nbytes, shape).seconds for n in (1, 2))
        assert whole <= TUNED * 2 * half


@each_cluster
def test_more_nodes_are_never_quicker(name: str) -> None:
    """A MiB or more among one, two and four nodes, by collectives that all ranks send in."""
    for cluster, _, size, _ in questions(name):
        node, nbytes = cluster.ranks_per_node, max(size, 2.0**20)
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
            groups = (GroupShape(nodes * node, node) for nodes in (1, 2, 4))
            one, two, four = (cluster.seconds(kind, nbytes, group).seconds for group in groups)
            assert one <= EXACT * two
            assert two <= EXACT * four


@each_cluster
def test_more_groups_at_once_are_never_quicker(name: str) -> None:
    """They share the NICs of a node."""
    for cluster, kind, nbytes, _ in questions(name):
        node = cluster.ranks_per_node
        alone, beside = (
            cluster.seconds(kind, nbytes, GroupShape(4, 1, n)).seconds for n in (1, node)
        )
        assert alone <= TUNED * beside


@each_cluster
def test_an_all_reduce_costs_no_more_than_its_halves(name: str) -> None:
    """A reduce-scatter and an all-gather are an all-reduce, which takes longer than either."""
    for cluster, _, nbytes, shape in questions(name):
        both, scatter, gather = (
            cluster.seconds(kind, nbytes, shape).seconds
            for kind in ("all_reduce", "reduce_scatter", "all_gather")
        )
        assert both <= TUNED * (scatter + gather)


@each_cluster
def test_a_document_keeps_every_price(name: str) -> None:
    """A cluster that is written and read again prices alike."""
    again = Cluster.from_dict(cluster_of(name).to_dict())
    for cluster, kind, nbytes, shape in questions(name):
        assert again.seconds(kind, nbytes, shape) == cluster.seconds(kind, nbytes, shape)


@each_cluster
def test_the_order_of_nodes_changes_no_price(name: str) -> None:
    """Machines are alike, whichever of them is called first."""
    draw, base = random.Random(name), cluster_of(name)
    assert base.topology is not None
    order = draw.sample(range(4), 4)
    whole = every_machine(base.topology)
    moved = {
        node: f"node{order[int(node[4])]}{node[5:]}" for node in whole if node.startswith("node")
    }
    shuffled = nx.Graph(nx.relabel_nodes(whole, moved))
    other = replace(base, topology=shuffled)
    for cluster, kind, nbytes, shape in questions(name):
        one, two = (c.seconds(kind, nbytes, shape).seconds for c in (cluster, other))
        assert two == pytest.approx(one, rel=1e-9)


@each_cluster
def test_nothing_is_sent_to_oneself(name: str) -> None:
    """A group of one rank communicates in no time, at any number of bytes."""
    for cluster, kind, nbytes, _ in questions(name):
        assert cluster.seconds(kind, nbytes, GroupShape(1, 1)).seconds == 0.0


@each_cluster
def test_a_faster_link_only_divides_what_is_beyond_latency(name: str) -> None:
    """A rate of 1 changes nothing, more never slows down, and latency stays."""
    for cluster, kind, nbytes, shape in questions(name):
        known = cluster.seconds(kind, nbytes, shape).seconds
        half, same, twice, endless = (
            ScaledBandwidth.of(cluster, rate).seconds(kind, nbytes, shape).seconds
            for rate in (0.5, 1.0, 2.0, 1e15)
        )
        assert same == pytest.approx(known, rel=1e-12)
        assert half >= same >= twice >= endless
        least = min(known, cluster.seconds(kind, 1, shape).seconds)
        assert endless == pytest.approx(least, rel=1e-6)
        assert half - endless == pytest.approx(4 * (twice - endless), rel=1e-6, abs=1e-15)


def test_a_ring_divides_its_bytes_by_the_link() -> None:
    """Latency and bytes add up; all-reduces are both of their halves."""
    draw = random.Random(0)
    for _ in range(200):
        ranks, nbytes = draw.randint(2, 64), draw.uniform(1, 1e9)
        link = Link(0.0, draw.uniform(0, 1e-5), draw.uniform(1e9, 1e12))
        faster = replace(link, bytes_per_s=2 * link.bytes_per_s)

        def seconds(kind: str, of: Link = link, n: float = nbytes, k: int = ranks) -> float:
            return of.seconds(kind, n, k, "nccl")

        for kind in COLLECTIVES:
            assert seconds(kind, faster) <= seconds(kind)
            steps = ring(kind, ranks, "nccl")[0]
            beyond = seconds(kind) - steps * link.step_s
            assert beyond == pytest.approx(2 * (seconds(kind, faster) - steps * link.step_s))
        halves = seconds("reduce_scatter") + seconds("all_gather")
        assert seconds("all_reduce") == pytest.approx(halves)
        assert seconds("all_reduce") == pytest.approx(
            2 * (ranks - 1) * link.step_s + 2 * (ranks - 1) / ranks * nbytes / link.bytes_per_s
        )


def test_bytes_that_leave_nodes_are_those_of_their_groups() -> None:
    """None inside a node; of several groups the sum; of all-reduces both halves."""
    draw = random.Random(0)
    for _ in range(200):
        node, nodes = 2 ** draw.randint(0, 3), draw.randint(2, 8)
        kind, backend = draw.choice(COLLECTIVES), draw.choice(["nccl", "gloo"])
        near = 2 ** draw.randint(0, 3)
        assert leaving(kind, GroupShape(near, near), backend, near) == 0.0
        shape = GroupShape(nodes, 1)
        alone, beside = (leaving(kind, shape, backend, ranks) for ranks in (1, node))
        assert beside == pytest.approx(node * alone)
        whole = GroupShape(nodes * node, node)
        both, scatter, gather = (
            leaving(k, whole, "nccl", node) for k in ("all_reduce", "reduce_scatter", "all_gather")
        )
        assert both == pytest.approx(scatter + gather)
        assert both == pytest.approx(2 * (nodes * node - 1) / (nodes * node))


def test_curves_stay_between_their_points_and_keep_their_units() -> None:
    """Prices never fall, and seconds in other units are seconds times a factor."""
    draw = random.Random(0)
    for _ in range(50):
        sizes = sorted(draw.sample(range(64, 1 << 24), 8))
        times = sorted(draw.uniform(1e-6, 1e-2) for _ in sizes)
        curve = Curve(tuple(sizes), tuple(times))
        slower = Curve(tuple(sizes), tuple(3 * time for time in times))
        asked = sorted(2 ** draw.uniform(4, 28) for _ in range(20))
        found = [curve(size) for size in asked]
        assert all(a <= EXACT * b for a, b in pairwise(found))
        assert [slower(size) for size in asked] == pytest.approx([3 * s for s in found])
        for low, high, a, b in zip(sizes, sizes[1:], times, times[1:], strict=False):
            assert a <= curve(draw.uniform(low, high)) <= b


def test_a_faster_host_link_is_never_slower() -> None:
    """Copies to a GPU and from it, over links of any rate."""
    draw = random.Random(0)
    for _ in range(100):
        rate, nbytes = draw.uniform(1e9, 1e12), round(2 ** draw.uniform(4, 34))
        slow, fast = copies_over(rate), copies_over(2 * rate)
        for kind in (TO_HOST, FROM_HOST):
            assert fast.seconds(kind, nbytes).seconds <= slow.seconds(kind, nbytes).seconds
            twice = slow.seconds(kind, 2 * nbytes).seconds
            assert (
                slow.seconds(kind, nbytes).seconds
                <= twice
                <= 2.05 * slow.seconds(kind, nbytes).seconds
            )
