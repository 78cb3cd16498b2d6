"""Relations between simulated steps of random programs: time, memory and their accounts."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from torch import fx

from autopar.core.ir.graph import TrainingGraph, tensor_bytes
from autopar.core.ir.messages import collective_of, is_wait
from autopar.core.ir.roles import Gradient, Input, InputRole, Output, Parameter
from autopar.core.ir.signature import signature
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.cluster.interference import Slowdown
from autopar.cost_model.measurement.operator_times import OperatorTimes
from autopar.cost_model.measurement.timing_context import Timing, TimingContext
from autopar.cost_model.memory.allocator import CachingAllocator, HostAllocator
from autopar.cost_model.memory.liveness import ALWAYS, Overhead, memory_spans
from autopar.cost_model.memory.optimizer_memory import OptimizerMemory
from autopar.cost_model.memory.peak import simulate_memory
from autopar.cost_model.simulator.bound import least_seconds
from autopar.cost_model.simulator.step import Simulation, simulate
from autopar.cost_model.simulator.streams import COMPUTE
from tests.cost_model.sketch import Sketch, aten, c10d

APART = Slowdown((1,), (1.0,), (1.0,), 0.0, 0.0, "measured now")
SHARED = Slowdown((1,), (1.5,), (1.3,), 1e-6, 1e-6, "measured now")
CLUSTER = replace(Cluster.default(4, "cuda"), slowdown=APART)
PROGRAMS = range(40)


def program(seed: int) -> tuple[TrainingGraph, dict[str, float]]:
    """A random program of two ranks, and the seconds of its operators by their names."""
    draw, g = random.Random(seed), Sketch(dp=2, tp=2)
    values = [g.take(Input(0), 2 ** draw.randint(4, 14))]
    weight = g.take(Parameter("w"), 2 ** draw.randint(4, 14))
    pending: list[Any] = []
    gradient = weight
    for phase in ("forward", "backward"):
        g.phase = phase
        for _ in range(draw.randint(3, 12)):
            kind = draw.random()
            if kind < 0.3:
                axis = draw.choice(["dp", "tp"])
                source = draw.choice([*values, weight])
                pending.append(g.call(c10d.all_reduce.default, source, "sum", axis))
            elif kind < 0.5 and pending:
                issued = pending.pop(draw.randrange(len(pending)))
                values.append(g.call(c10d.wait_tensor.default, issued))
            elif kind < 0.6:
                value = draw.choice(values)
                values.append(g.call(aten.repeat.default, value, [2]))
            else:
                operator = draw.choice([aten.sin, aten.cos, aten.exp]).default
                values.append(g.call(operator, draw.choice(values)))
        gradient = g.call(aten.neg.default, weight)
    done = [g.call(c10d.wait_tensor.default, issued) for issued in pending]
    result = g.call(aten.sum.default, draw.choice([*values, *done]))
    graph = g.give({Output(0): result, Gradient(Parameter("w")): gradient})
    names = ("sin", "cos", "exp", "neg", "sum", "repeat")
    return graph, {name: draw.uniform(1e-6, 1e-4) for name in names}


def programs() -> Iterator[tuple[TrainingGraph, dict[str, float]]]:
    yield from map(program, PROGRAMS)


def times(graph: TrainingGraph, seconds: dict[str, float]) -> OperatorTimes:
    table = {"dispatch": Timing(0.0, 0, 0, "now")}
    for node in graph.calls():
        if collective_of(node) is None and not is_wait(node):
            name = node.target.__name__.split(".")[0]
            table[signature(node)] = Timing(seconds[name], 0, 0, "now")
    return OperatorTimes(TimingContext("cpu", "test", 1, 1, "2"), True, table)


def step(graph: TrainingGraph, seconds: dict[str, float], cluster: Cluster = CLUSTER) -> Simulation:
    return simulate(graph, cluster, times(graph, seconds))


def overhead(states: int = 2, **options: Any) -> Overhead:
    """States of an optimizer with so many of a parameter's size."""
    memory = OptimizerMemory((1.0,) * states, 0, 0.0, 0.0, 0.0, "modelled by hand")
    return Overhead(memory, **options)


def link(cluster: Cluster, **figures: float) -> Cluster:
    assert cluster.link is not None
    return replace(cluster, link=replace(cluster.link, **figures))


# -- time ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slowdown", [APART, SHARED], ids=["apart", "shared"])
def test_a_step_lies_between_its_bounds(slowdown: Slowdown) -> None:
    """No shorter than any schedule of its messages, no longer than all of it one by one."""
    cluster = replace(CLUSTER, slowdown=slowdown)
    for graph, seconds in programs():
        found, operators = step(graph, seconds, cluster), times(graph, seconds)
        least = least_seconds(graph, cluster, operators)
        serial = found.compute_s + found.communication_s
        slower = 1.0 if slowdown is APART else 1.5 * 1.3 * 2
        assert found.compute_s <= found.step_s + 1e-12
        assert least <= found.step_s + 1e-12
        assert found.step_s <= slower * 2 * serial


@pytest.mark.parametrize("slowdown", [APART, SHARED], ids=["apart", "shared"])
def test_parts_of_a_program_make_up_its_step(slowdown: Slowdown) -> None:
    """Compute and exposure; waits by kind and by cause; forward and backward."""
    cluster = replace(CLUSTER, slowdown=slowdown)
    for graph, seconds in programs():
        found = step(graph, seconds, cluster)
        assert found.compute_s + found.exposed_s + found.idle_s == pytest.approx(found.step_s)
        assert found.forward_s + found.backward_s == pytest.approx(found.step_s)
        if slowdown is APART:
            assert sum(found.waits.values()) == pytest.approx(found.exposed_s, abs=1e-12)
        exposures = sum(each.exposed_s for each in found.exposures)
        assert exposures == pytest.approx(sum(found.waits.values()), abs=1e-12)


def test_the_timeline_has_one_event_of_a_stream_at_a_time() -> None:
    """Events lie within the step, and those of a stream follow one another."""
    for graph, seconds in programs():
        found = step(graph, seconds)
        streams: dict[str, list[tuple[float, float]]] = {}
        for event in found.timeline:
            assert -1e-12 <= event.start_s <= event.end_s <= found.step_s + 1e-12
            streams.setdefault(event.stream, []).append((event.start_s, event.end_s))
        for spans in map(sorted, streams.values()):
            assert all(a[1] <= b[0] + 1e-12 for a, b in pairwise(spans))
        busy = sum(e.seconds for e in found.timeline if (e.stream, e.kind) == (COMPUTE, COMPUTE))
        assert busy == pytest.approx(found.compute_s)


def test_faster_links_and_operators_are_never_slower() -> None:
    """Bandwidth, latency, and each operator by itself."""
    draw = random.Random(0)
    for graph, seconds in programs():
        base = step(graph, seconds).step_s
        slower = dict(seconds)
        slower[draw.choice(list(seconds))] *= 1.5
        assert step(graph, slower).step_s >= base - 1e-12
        assert step(graph, seconds, link(CLUSTER, bytes_per_s=3e11)).step_s <= base + 1e-12
        assert step(graph, seconds, link(CLUSTER, step_s=1e-6)).step_s <= base + 1e-12


def test_slowing_each_other_down_is_never_quicker() -> None:
    """Compute beside messages, and calls that take time."""
    shared = replace(CLUSTER, slowdown=SHARED)
    for graph, seconds in programs():
        assert step(graph, seconds).step_s <= step(graph, seconds, shared).step_s + 1e-12


def test_names_of_operators_change_nothing() -> None:
    """A program with other names takes as long and as much."""
    for seed in PROGRAMS:
        (graph, seconds), (other, _) = program(seed), program(seed)
        for index, node in enumerate(other.graph.nodes):
            node.name = f"renamed{len(seconds) - index}_{index}"
        one, two = step(graph, seconds), step(other, seconds)
        assert (one.step_s, one.waits) == (two.step_s, two.waits)
        assert one.memory.peak == two.memory.peak


# -- memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "NVIDIA H100 80GB HBM3"])
def test_rows_of_memory_add_up_to_the_peak(device: str) -> None:
    """The table sums to the curve, whose highest point is the peak, and reserved bytes cover it."""
    for graph, _ in programs():
        memory = simulate_memory(graph, overhead(device=device))
        assert memory.peak == max(memory.curve) == sum(memory.by_category.values())
        assert memory.reserved >= memory.peak or device == "cpu"
        assert (memory.table >= 0).all()


def test_the_curve_has_each_piece_of_memory_while_it_lives() -> None:
    """Pieces summed one by one; what always exists is below every point."""
    for graph, _ in programs():
        spans, memory = memory_spans(graph, overhead()), simulate_memory(graph, overhead())
        points = [i for i, node in enumerate(graph.graph.nodes) if node.op == "call_function"]
        points.append(len(graph.graph.nodes))
        alive = tuple(
            sum(span.nbytes for span in spans if span.start <= at <= span.end) for at in points
        )
        assert memory.curve == alive
        always = sum(span.nbytes for span in spans if span.start == ALWAYS)
        assert min(memory.curve) >= always


def test_more_to_hold_is_never_less_memory() -> None:
    """A third state and a second batch add their own bytes; retained collectives never free any."""
    for graph, _ in programs():
        base = simulate_memory(graph, overhead()).curve
        sizes = {type(role): tensor_bytes(node.meta["val"]) for role, node in inputs_of(graph)}
        for more, added in ((overhead(3), Parameter), (overhead(batches=2), Input)):
            curve = simulate_memory(graph, more).curve
            assert curve == tuple(held + sizes[added] for held in base)
        for count in (1, 3):
            curve = simulate_memory(graph, overhead(retained_collectives=count)).curve
            assert all(a <= b for a, b in zip(base, curve, strict=True))


def inputs_of(graph: TrainingGraph) -> Iterator[tuple[InputRole, fx.Node]]:
    return zip(graph.inputs, graph.placeholders, strict=True)


def requests(seed: int) -> Iterator[tuple[int, int | None]]:
    """Random requests: their bytes and None, or 0 and the index of an earlier one to free."""
    draw, live, count = random.Random(seed), list[int](), 0
    for _ in range(200):
        if live and draw.random() < 0.45:
            yield 0, live.pop(draw.randrange(len(live)))
        else:
            live.append(count)
            count += 1
            yield round(2 ** draw.uniform(0, 27)), None
    yield from ((0, index) for index in live)


@pytest.mark.parametrize("kind", [HostAllocator, CachingAllocator])
def test_an_allocator_gives_back_what_it_gave(kind: type[Any]) -> None:
    """Blocks hold their requests and never overlap, reserved bytes hold all blocks."""
    for seed in range(20):
        allocator, wanted = kind(), list[int]()
        blocks: dict[int, tuple[int, int]] = {}
        for nbytes, freed in requests(seed):
            if freed is not None:
                allocator.free(blocks.pop(freed)[0])
            else:
                address = allocator.malloc(nbytes)
                assert allocator.size(address) >= nbytes
                end = address + allocator.size(address)
                assert all(end <= a or b <= address for a, b in blocks.values())
                blocks[len(wanted)] = (address, end)
                wanted.append(nbytes)
            assert allocator.allocated == sum(end - start for start, end in blocks.values())
            assert allocator.reserved >= allocator.allocated
        assert allocator.allocated == 0


def test_reserved_memory_is_used_again() -> None:
    """The same requests once more take nothing further from the device."""
    for seed in range(20):
        allocator, seen = CachingAllocator(), []
        for _ in range(3):
            addresses: list[int] = []
            for nbytes, freed in requests(seed):
                if freed is None:
                    addresses.append(allocator.malloc(nbytes))
                else:
                    allocator.free(addresses[freed])
            seen.append(allocator.reserved)
        assert seen[1] == seen[2] <= 1.3 * seen[0]
