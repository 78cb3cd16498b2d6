"""Objects and CPU tensors never go over a group that carries tensors of GPUs alone."""

from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed as dist
from torch.distributed import ProcessGroupGloo

import autopar
from autopar.core.common.groups import advice_for_hangs, backends_of, cpu_group, has_ended
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.measurement.step_replay import ReplayGroup
from autopar.runtime.module import DistributedModule
from tests.harness.models import MODELS
from tests.harness.reference import batches
from tests.harness.worlds import run


def gpu_only(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    return ProcessGroupGloo(store, rank, size, timeout=timeout)


def start_with_gpus_only() -> None:
    """Start the default group with a backend for tensors of GPUs alone, as of "nccl"."""
    if "gpuonly" not in dist.Backend.backend_list:
        dist.Backend.register_backend("gpuonly", gpu_only, devices=["cuda"])
    dist.init_process_group("cuda:gpuonly", timeout=timedelta(seconds=60))


def planned(rank: int, world_size: int) -> Any:
    """Plan for running ranks, with everything measured and agreed on but the first values."""
    start_with_gpus_only()
    plans: list[Any] = []
    rows = 8
    (args, _), *_ = batches(MODELS["gpt"], [0], rows, torch.float32)
    with (
        mock.patch("autopar.session.compile_model.ensure_process_group", return_value=world_size),
        mock.patch.object(DistributedModule, "broadcast_parameters"),
        mock.patch.object(DistributedModule, "apply_plan", lambda self, plan: plans.append(plan)),
        mock.patch("autopar.planner.machine.DeviceMesh.from_group", return_value=None),
    ):
        autopar.compile(
            MODELS["gpt"].make(),
            strategy=autopar.Strategy(search=("tp",)),
            example_inputs=args,
            cluster=Cluster.default(world_size),
            trials=0,
            fallback=False,
        )
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        return plans[0].digest(), str(error)


@pytest.mark.slow
def test_planning_needs_no_cpu_backend_of_the_default_group() -> None:
    first, second = run(planned, 2, init=False)
    assert first == second
    assert "No backend type associated with device type cpu" in first[1]  # so the test can fail


def exchanged(rank: int, world_size: int) -> Any:
    start_with_gpus_only()
    ranks = ReplayGroup.live()
    ranks.line_up()
    again = cpu_group() is cpu_group()
    return ranks.gather(rank), ranks.sharing, again, dist.get_backend(cpu_group()), backends_of()


def test_a_gloo_group_beside_it_carries_them() -> None:
    wanted = ([0, 1], 2, True, "gloo", {"cuda": "gpuonly"})
    assert run(exchanged, 2, init=False) == [wanted] * 2


def beside_gloo(rank: int, world_size: int) -> Any:
    return cpu_group() is dist.group.WORLD, advice_for_hangs()


def test_a_group_that_carries_cpu_tensors_serves_itself() -> None:
    assert run(beside_gloo, 2) == [(True, "")] * 2


def test_the_flight_recorder_is_named_where_nccl_may_hang() -> None:
    with (
        mock.patch.object(dist, "is_initialized", return_value=True),
        mock.patch.object(dist, "get_backend_config", return_value="cpu:gloo,cuda:nccl"),
    ):
        assert "TORCH_FR_BUFFER_SIZE" in advice_for_hangs()
    assert advice_for_hangs() == ""


def polled(rank: int, world_size: int) -> None:
    """Works end on threads of gloo, which take hooks on saved tensors along under a profiler."""
    identity = lambda x: x  # noqa: E731
    with torch.profiler.profile(), torch.autograd.graph.saved_tensors_hooks(identity, identity):
        for _ in range(30):
            tensor = torch.zeros(1 << 10)
            works = [dist.all_reduce(tensor, async_op=True) for _ in range(8)]
            while not all(map(has_ended, works)):
                pass


def test_polling_does_not_stop_the_thread_that_ends_a_work() -> None:
    run(polled, 2, timeout=100)
