"""The harness that the other tests stand on."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.harness import worlds
from tests.harness.worlds import RankError, run, run_isolated


def sum_of_ranks(rank: int, world_size: int, start: int = 0) -> tuple[int, torch.Tensor]:
    total = torch.tensor([float(rank + start)])
    dist.all_reduce(total)
    return os.getpid(), total


def draw(rank: int, world_size: int) -> float:
    return torch.rand(()).item()


def fail_in_one(rank: int, world_size: int, culprit: int) -> str:
    if rank == culprit:
        raise ValueError(f"rank {rank} objects")
    dist.barrier()
    return "unreachable"


def fail_apart(rank: int, world_size: int) -> str:
    if rank == 1:
        raise KeyError("missing")
    return "fine"


def answer_unpicklable(rank: int, world_size: int) -> object:
    return lambda: rank


def die(rank: int, world_size: int, victim: int) -> str:
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def sleep_long(rank: int, world_size: int) -> None:
    if rank == 0:
        time.sleep(60)


def spoil_process(rank: int, world_size: int) -> None:
    os.environ["AUTOPAR_SPOILED"] = "1"
    torch.set_default_dtype(torch.float64)


def look_at_process(rank: int, world_size: int) -> tuple[str | None, str | None, torch.dtype]:
    return os.environ.get("AUTOPAR_SPOILED"), os.environ.get("AUTOPAR_GIVEN"), torch.rand(1).dtype


def init_by_itself(rank: int, world_size: int) -> int:
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    return dist.get_world_size()


def gather_over_mesh(rank: int, world_size: int, other_groups: int) -> torch.Tensor:
    for _ in range(other_groups):
        dist.new_group([0])
    mesh = init_device_mesh("cpu", (world_size,))
    tensor = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    return (tensor * 2).redistribute(placements=[Replicate()]).to_local()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_talk(world_size: int) -> None:
    answers = run(sum_of_ranks, world_size, start=1)
    total = world_size * (world_size + 1) / 2
    assert [value.item() for _, value in answers] == [total] * world_size


def test_workers_are_kept() -> None:
    worlds._POOL.runs = 0  # they are replaced now and then
    first, second = (run(sum_of_ranks, 2) for _ in range(2))
    assert [pid for pid, _ in first] == [pid for pid, _ in second]


def test_ranks_are_seeded_alike() -> None:
    first, second = run(draw, 2), run(draw, 2)
    assert first == second
    assert len(set(first)) == 1


def test_one_failing_rank_is_reported_and_the_others_stop() -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match="rank 1 objects") as caught:
        run(fail_in_one, 3, culprit=1)
    assert "in fail_in_one" in caught.value.errors[1]
    assert set(caught.value.errors) == {0, 1, 2}
    assert time.monotonic() - started < worlds.GROUP_TIMEOUT.total_seconds() / 2


def test_errors_can_be_answers() -> None:
    assert run(fail_apart, 2, expect_errors=True) == ["fine", ("KeyError", "'missing'")]


def test_what_cannot_travel_is_an_error_of_its_rank() -> None:
    with pytest.raises(RankError, match="pickle"):
        run(answer_unpicklable, 2)
    assert len(run(draw, 2)) == 2


def test_what_a_run_changes_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    run(spoil_process, 1)
    monkeypatch.setenv("AUTOPAR_GIVEN", "yes")
    assert run(look_at_process, 1) == [(None, "yes", torch.float32)]


def test_a_function_may_make_the_group() -> None:
    assert run(init_by_itself, 2, init=False) == [2, 2]


@pytest.mark.slow
def test_meshes_do_not_outlive_their_groups() -> None:
    for other_groups in (0, 2):
        for gathered in run(gather_over_mesh, 2, other_groups=other_groups):
            assert gathered.tolist() == [0.0, 2.0, 4.0, 6.0]


@pytest.mark.slow
def test_a_dead_rank_fails_the_run_and_the_pool_recovers() -> None:
    with pytest.raises(RankError, match="exit code -9") as caught:
        run(die, 2, victim=1, expect_errors=True)
    assert set(caught.value.errors) == {1}
    assert [value.item() for _, value in run(sum_of_ranks, 2)] == [1.0, 1.0]


@pytest.mark.slow
def test_a_long_run_is_stopped_and_shows_where_it_was() -> None:
    with pytest.raises(RankError, match="still busy") as caught:
        run(sleep_long, 2, timeout=5.0)
    assert set(caught.value.errors) == {0}
    assert "in sleep_long" in caught.value.errors[0]


@pytest.mark.slow
def test_isolated_ranks_may_die() -> None:
    answers = run_isolated(die, 2, victim=0, expect_errors=True)
    assert answers == [("Died", "exit code -9"), "alive"]
