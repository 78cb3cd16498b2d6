"""Steps with values in files and in host memory, computed by hand."""

from dataclasses import replace

import pytest
import torch

from autopar.core.ir.graph import TrainingGraph
from autopar.core.ir.messages import FROM_HOST, READ, TO_HOST, WRITE, is_stored, transfer_of
from autopar.core.ir.roles import Input, Output, Parameter
from autopar.core.ir.signature import time_key
from autopar.core.operators import offload, parameters
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.cluster.interference import NO_SLOWDOWN
from autopar.cost_model.curves.curve import Curve
from autopar.cost_model.measurement.operator_times import OperatorTimes
from autopar.cost_model.measurement.timing_context import Timing, TimingContext
from autopar.cost_model.simulator.chrome_trace import slices_of
from autopar.cost_model.simulator.step import Simulation, simulate
from autopar.cost_model.storage import Storage
from tests.cost_model.sketch import Sketch, aten

BYTES = 400


def taking(write_s: float, read_s: float, **factors: float) -> Storage:
    """Transfers of BYTES bytes that take some seconds."""
    curves = (Curve((BYTES,), (seconds,)) for seconds in (write_s, read_s))
    return Storage(*curves, "measured now", **factors)


def on_gpu(**tiers: Storage) -> Cluster:
    return replace(Cluster.default(1, "cuda"), slowdown=NO_SLOWDOWN, **tiers)


def step(graph: TrainingGraph, cluster: Cluster, dispatch_s: float = 0.0) -> Simulation:
    """Simulates with operators of a second, and calls of the host that take `dispatch_s`."""
    table = {"dispatch": Timing(0.0, 0, 0, "now", host_s=dispatch_s)}
    for node in graph.calls():
        if not node.target.name().startswith("autopar"):
            table[time_key(node)] = Timing(1.0, 0, 0, "now")
    operators = OperatorTimes(TimingContext("H100", "H100", 1, 1, "2"), True, table)
    return simulate(graph, cluster, operators)


def round_trip(folder: str, compute: int = 2) -> TrainingGraph:
    """A value leaves and comes back beside operators, while a parameter comes."""
    g = Sketch()
    x = g.take(Input(0), BYTES // 4, device="cuda")
    w = g.take(Parameter("w"), BYTES // 4, device="cuda")
    value = g.call(aten.sin.default, x)
    ticket = g.call(offload.offload, value, folder)
    buffer = g.call(parameters.fetch, w, "")
    y = value
    for _ in range(compute):
        y = g.call(aten.cos.default, y)
    weight = g.call(parameters.fetched, buffer)
    ticket = g.call(offload.offloaded, ticket, value)
    layout = [BYTES // 4], [1], torch.float32, torch.device("cuda")
    back = g.call(offload.prefetch, ticket, folder, *layout)
    back = g.call(offload.prefetched, back, ticket)
    return g.give({Output(0): g.call(aten.add.Tensor, back, weight), Output(1): y})


def lanes(result: Simulation) -> list[tuple[str, str, float, float]]:
    """Events of other streams than compute."""
    spans = ((e.stream, e.kind, e.start_s, e.end_s) for e in result.timeline)
    return [span for span in spans if span[0] != "compute"]


def test_copies_both_ways_run_beside_compute_and_each_other() -> None:
    result = step(round_trip(""), on_gpu(host=taking(1.0, 2.0)))
    assert lanes(result) == [
        ("to host", TO_HOST, 1.0, 2.0),
        ("from host", FROM_HOST, 1.0, 3.0),
        ("from host", FROM_HOST, 3.0, 5.0),
    ]
    assert (result.step_s, result.compute_s, result.exposed_s) == (6.0, 4.0, 2.0)
    assert result.waits == {FROM_HOST: 2.0, TO_HOST: 0.0}
    assert {each.row for each in slices_of("a rank", result.timeline)} == {
        "compute",
        "to host",
        "from host",
    }


def test_copies_slow_each_other_and_compute_down() -> None:
    host = taking(1.0, 2.0, on_compute=1.25, beside_compute=1.5, both_ways=2.0)
    result = step(round_trip(""), on_gpu(host=host))
    # Beside compute and each other both take 3 times as long, without compute twice as long. The
    # cosines end at 1 + 2 * 1.25 = 3.5, when 2.5 / 3 of each copy is done.
    out_s = 3.5 + (1 - 2.5 / 3) * 2
    back_s = out_s + 2 - 2.5 / 3 - (out_s - 3.5) / 2
    assert lanes(result) == [
        ("to host", TO_HOST, 1.0, pytest.approx(out_s)),
        ("from host", FROM_HOST, 1.0, pytest.approx(back_s)),
        ("from host", FROM_HOST, pytest.approx(back_s), pytest.approx(back_s + 2.0)),
    ]
    assert result.step_s == pytest.approx(back_s + 3.0)


def test_the_host_issues_copies_and_waits_for_them() -> None:
    result = step(round_trip("", compute=0), on_gpu(host=taking(0.5, 0.5)), dispatch_s=2.0)
    # calls: offload by 2, fetch by 4, both waits by 8, prefetch by 10
    assert lanes(result) == [
        ("to host", TO_HOST, 2.0, 2.5),
        ("from host", FROM_HOST, 4.0, 4.5),
        ("from host", FROM_HOST, 10.0, 10.5),
    ]
    assert result.host_s == 12.0


def test_files_of_gpus_are_reached_through_host_memory() -> None:
    tiers = {"storage": taking(4.0, 8.0), "host": taking(1.0, 2.0)}
    result = step(round_trip("/files", compute=0), on_gpu(**tiers))
    assert lanes(result) == [
        ("from host", FROM_HOST, 1.0, 3.0),
        ("storage", WRITE, 1.0, pytest.approx(6.0)),
        ("storage", READ, pytest.approx(6.0), pytest.approx(16.0)),
    ]


def test_parameters_lie_in_files_or_host_memory() -> None:
    g = Sketch()
    stored = [g.take(Parameter(name), BYTES // 4) for name in ("host", "file")]
    pairs = zip(stored, ("", "/files"), strict=True)
    fetched = [g.call(parameters.fetch, parameter, folder) for parameter, folder in pairs]
    assert [transfer_of(node) for node in fetched] == [FROM_HOST, READ]
    assert all(map(is_stored, stored))
