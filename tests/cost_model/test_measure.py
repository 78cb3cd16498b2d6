import os
import shutil

import pytest
import torch.distributed as dist

from autopar.cost_model.cost import ClusterError
from autopar.cost_model.measure import TIMED, measure
from autopar.cost_model.measured import CurveKey
from autopar.cost_model.shape import GroupShape
from autopar.cost_model.store import cache_directory
from tests.worlds import run

SIZES = (1024, 65536)


def _measure_twice(rank: int, world_size: int) -> tuple:
    first = measure(sizes=SIZES, budget_s=0.2)
    files = sorted(path.name for path in cache_directory().glob("clusters/*")) if rank == 0 else []
    again = measure(sizes=SIZES, budget_s=0.2)
    if rank == 1:  # only what rank 0 finds on its disk counts
        os.environ["AUTOPAR_CACHE"] += "-elsewhere"
    third = measure(sizes=SIZES, budget_s=0.2)
    return first, again == first == third, files, dist.get_world_size()


def test_all_ranks_get_the_same_cluster_and_keep_it(tmp_path):
    answers = run(_measure_twice, 2, env={"AUTOPAR_CACHE": str(tmp_path)})
    (first, kept, files, world), (second, *_) = answers
    assert first == second
    assert kept
    assert len(files) == 1
    pair = GroupShape(2, 2)
    assert set(first.curves) == {CurveKey(name, pair) for name in TIMED}
    assert first.curves[CurveKey("all_reduce", pair)].curve.bytes == SIZES
    assert first.world_size == first.ranks_per_node == world == 2
    assert 0 <= first.overlap <= 1
    assert first.provenance.startswith("measured 20")
    assert first.seconds("all_gather", 4096, pair).kind == "measured"


def _measure_parts(rank: int, world_size: int) -> list:
    half = dist.new_group([0, 1], use_local_synchronization=True) if rank < 2 else None
    whole = measure(sizes=(1000,), budget_s=0.1, cache=False, collectives=("all_reduce",))
    part = None
    if half is not None:
        part = measure(half, sizes=(1000,), budget_s=0.1, collectives=("broadcast",))
    return [sorted((k.collective, k.shape) for k in c.curves) for c in (whole, part) if c]


def test_every_divisor_of_the_world_is_measured_and_a_group_by_itself(tmp_path):
    answers = run(_measure_parts, 4, env={"AUTOPAR_CACHE": str(tmp_path)})
    whole = [("all_reduce", GroupShape(2, 2, groups=2)), ("all_reduce", GroupShape(4, 4))]
    assert answers == [[whole, [("broadcast", GroupShape(2, 2))]]] * 2 + [[whole]] * 2


def test_without_a_group_there_is_nothing_to_send():
    cluster = measure()
    assert (cluster.world_size, dict(cluster.curves)) == (1, {})
    assert cluster.seconds("all_reduce", 1e9, GroupShape(1, 1)).seconds == 0


def test_a_fake_group_is_modelled():
    dist.init_process_group("fake", rank=0, world_size=256)
    try:
        cluster = measure()
    finally:
        dist.destroy_process_group()
    assert cluster.world_size == 256
    assert cluster.provenance.startswith("modelled")


def test_bad_requests_are_refused():
    with pytest.raises(ClusterError, match="'gather' is no collective"):
        measure(collectives=("gather",))
    with pytest.raises(ClusterError, match="sizes must be positive"):
        measure(sizes=(0,))


def test_a_folder_that_cannot_be_written_is_only_a_warning(tmp_path, monkeypatch):
    from autopar.cost_model.store import read_json, write_json

    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.warns(UserWarning, match="could not keep its measurements"):
        write_json(blocked / "x.json", {})
    write_json(tmp_path / "deep" / "x.json", {"a": 1})
    assert read_json(tmp_path / "deep" / "x.json") == {"a": 1}
    shutil.rmtree(tmp_path / "deep")
    assert read_json(tmp_path / "deep" / "x.json") is None
