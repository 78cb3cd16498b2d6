import json
import os
import signal
import warnings
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from autopar.core.ir.messages import COLLECTIVES
from autopar.cost_model.cost import ClusterError
from autopar.cost_model.curves.measured_curve import CurveKey
from autopar.cost_model.disk_cache import cache_directory
from autopar.cost_model.group_shape import GroupShape
from autopar.cost_model.measurement import cluster_cache as kept
from autopar.cost_model.measurement.bench import Bench
from autopar.cost_model.measurement.group_layouts import (
    MAX_GROUPS,
    affordable,
    layouts,
    measured_axes,
)
from autopar.cost_model.measurement.measure import measure
from autopar.cost_model.measurement.sampling import sample_in_turn
from tests.harness.worlds import Raised, run, run_isolated

SIZES = (1024, 65536)
PAIR = GroupShape(2, 2)


def _measure_twice(rank: int, world_size: int) -> tuple:
    factor, kept.FACTOR = kept.FACTOR, 1e9  # however noisy the machine, the kept one holds
    try:
        first = measure(sizes=SIZES, budget_s=0.2)
        files = sorted(path.name for path in cache_directory().glob("clusters/*"))
        if rank == 1:  # only what rank 0 finds on its disk counts
            os.environ["AUTOPAR_CACHE"] += "-elsewhere"
        again = measure(collectives=("all_gather",), mesh={"dp": 2}, sizes=SIZES, budget_s=0.1)
        os.environ["NCCL_ALGO"] = "Ring"
        measure(sizes=SIZES, budget_s=0.1)
        return first, again == first, len(files), len(list(cache_directory().glob("clusters/*")))
    finally:
        os.environ.pop("NCCL_ALGO", None)
        kept.FACTOR = factor


@pytest.mark.slow
def test_all_ranks_get_the_same_cluster_and_keep_it(tmp_path):
    answers = run(_measure_twice, 2, env={"AUTOPAR_CACHE": str(tmp_path)})
    (first, holds, files, files_with_ring), (second, *_) = answers
    assert first == second
    assert holds
    assert (files, files_with_ring) == (1, 2), "one for each environment of the ranks"
    assert set(first.curves) == {CurveKey(name, PAIR) for name in COLLECTIVES}
    assert first.curves[CurveKey("all_reduce", PAIR)].curve.bytes[0] == SIZES[0]
    assert first.world_size == first.ranks_per_node == 2
    assert first.slowdown.provenance.startswith("measured")
    assert first.slowdown.record_s >= 0.0
    assert first.provenance.startswith("measured 20")
    assert first.seconds("all_gather", 1024, PAIR).kind == "measured"


def _spoil_what_is_kept(rank: int, world_size: int) -> tuple:
    settings = {"collectives": ("all_reduce",), "sizes": SIZES, "budget_s": 0.1}
    measure(**settings)
    if rank == 0:
        (path,) = cache_directory().glob("clusters/*")
        data = json.loads(path.read_text())
        for row in data["cluster"]["curves"]:
            row["seconds"] = [seconds * 1e4 for seconds in row["seconds"]]
        path.write_text(json.dumps(data))
    dist.barrier()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        again = measure(**settings)
    return again.seconds("all_reduce", 1024, PAIR).seconds, [str(w.message) for w in said]


@pytest.mark.slow
def test_a_kept_measurement_that_no_longer_holds_is_replaced_and_said_so(tmp_path):
    first, second = run(_spoil_what_is_kept, 2, env={"AUTOPAR_CACHE": str(tmp_path)})
    assert first[0] < 1
    assert "all_reduce of 1024 bytes over 2 ranks" in first[1][0]
    assert second == (first[0], [])


def _measure_parts(rank: int, world_size: int) -> list:
    settings = {"sizes": (1000,), "budget_s": 0.1, "cache": False, "dtype": "bfloat16"}
    half = dist.new_group([0, 1], use_local_synchronization=True) if rank < 2 else None
    made = [measure(collectives=("all_reduce", "send"), **settings)]
    if half is not None:
        for _ in range(2):  # groups of a part of the world are used again
            last = measure(half, collectives=("broadcast", "send"), **settings)
        made.append(last)
    return [{(k.collective, k.shape, k.dtype) for k in cluster.curves} for cluster in made]


@pytest.mark.slow
def test_every_shape_is_measured_and_a_group_by_itself(tmp_path):
    answers = run(_measure_parts, 4, env={"AUTOPAR_CACHE": str(tmp_path)})
    shapes = [PAIR, GroupShape(2, 2, groups=2), GroupShape(4, 4)]
    whole = {("all_reduce", shape, "bfloat16") for shape in shapes}
    whole |= {("send", shape, "bfloat16") for shape in shapes[:2]}
    part = {(collective, PAIR, "bfloat16") for collective in ("broadcast", "send")}
    assert answers == [[whole, part]] * 2 + [[whole]] * 2


def _measure_nodes(rank: int, world_size: int) -> int:
    os.environ["NCCL_HOSTID"] = f"machine {rank // 2}"
    with mock.patch("socket.gethostname", return_value="pod" if rank < 2 else f"pod {rank}"):
        settings = {"sizes": (1000,), "budget_s": 0.1, "cache": False}
        return measure(collectives=("all_reduce",), **settings).ranks_per_node


@pytest.mark.slow
def test_machines_decide_the_nodes_whatever_their_hosts_are_called():
    assert run(_measure_nodes, 4) == [2] * 4


def test_without_a_group_there_is_nothing_to_send():
    cluster = measure()
    assert (cluster.world_size, dict(cluster.curves)) == (1, {})
    assert cluster.seconds("all_reduce", 1e9, GroupShape(1, 1)).seconds == 0


def test_a_fake_group_is_modelled():
    dist.init_process_group("fake", rank=0, world_size=256)
    try:
        cluster, gpus = measure(), measure(device=torch.device("cuda", 0))
    finally:
        dist.destroy_process_group()
    assert cluster.world_size == gpus.world_size == 256
    assert cluster.provenance.startswith("modelled")
    assert (cluster.backend, gpus.backend) == ("gloo", "nccl")


@pytest.mark.parametrize(("world", "made"), [(8, 16), (64, 22), (1024, 15)])
def test_at_most_a_dozen_groups_exist_at_a_time_and_all_are_destroyed(world, made, monkeypatch):
    alive, most, new = set(), [0], []

    def create(*args, make=dist.new_group, **options):
        new.append(group := make(*args, **options))
        if isinstance(group, dist.ProcessGroup):  # this rank is in it
            alive.add(group)
        most[0] = max(most[0], len(alive))
        return group

    def destroy(group, end=dist.destroy_process_group):
        alive.remove(group)
        end(group)

    dist.init_process_group("fake", rank=0, world_size=world)
    try:
        monkeypatch.setattr(dist, "new_group", create)
        monkeypatch.setattr(dist, "destroy_process_group", destroy)
        axes = measured_axes(world, 8)
        shapes = affordable(layouts(axes, world, 8, alone=True))
        with Bench(dist.group.WORLD, torch.device("cpu")) as bench:
            curves = {CurveKey("all_reduce", shape): found for shape, found in shapes.items()}
            table = sample_in_turn(bench, curves, SIZES, 0.1, lambda done: None)
            assert not alive
        assert set(table) == set(curves)
        assert 1 < most[0] <= MAX_GROUPS
        assert len(new) == made
    finally:
        monkeypatch.undo()
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"collectives": ("gather",)}, "collectives='gather': choose all_reduce"),
        ({"collectives": ()}, r"collectives=\(\): give a list"),
        ({"sizes": (0,)}, "sizes=0: give a whole number from 1"),
        ({"sizes": ()}, r"sizes=\(\): give a list"),
        ({"dtype": "float7"}, "dtype='float7': choose float32, .*; did you mean 'float"),
        ({"budget_s": -1.0}, "budget_s=-1.0: give a positive number of seconds"),
        ({"mesh": {"dp": 3}}, r"\{'dp': 3\} is not of 1 ranks"),
    ],
)
def test_bad_requests_are_refused(arguments, says):
    with pytest.raises(ClusterError, match=says):
        measure(**arguments)


def _disagree(rank: int, world_size: int) -> None:
    measure(sizes=(1024 * (rank + 1),), budget_s=0.1)


def test_ranks_that_disagree_are_told_on_every_rank():
    message = "measure: sizes is (1024,) on rank 0 but (2048,) on rank 1"
    answers = run(_disagree, 2, expect_errors=True)
    assert answers == [Raised("DisagreementError", message)] * 2


def _die_while_measuring(rank: int, world_size: int) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=5))
    if rank == 1:
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        signal.setitimer(signal.ITIMER_REAL, 1.0)
    measure(sizes=SIZES, budget_s=30.0, cache=False)


@pytest.mark.slow
def test_when_a_rank_dies_the_others_say_what_they_were_doing():
    answers = run_isolated(_die_while_measuring, 3, init=False, timeout=60, expect_errors=True)
    assert answers[1].type == "Died"
    for answer in (answers[0], answers[2]):
        assert answer.type == "CommunicationError"
        assert "while timing" in answer.message or "while agreeing" in answer.message
