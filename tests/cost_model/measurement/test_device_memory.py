"""Memory that a plan may fill on simulated GPUs."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from autopar.capture.model_info import describe_parameters
from autopar.core.plan.strategy import Strategy
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.measurement import device_memory
from autopar.cost_model.measurement.device_memory import COMMUNICATOR_BYTES, DeviceMemory
from autopar.cost_model.memory.allocator import workspace_bytes
from autopar.planner.problem import PlanningProblem
from autopar.session.offline import plan_offline
from tests.harness.fake_cuda import GIB, FakeCuda

MIB = 2**20


@pytest.fixture
def gpu(monkeypatch):
    """A GPU with NCCL: the first collective of each group takes memory of the device."""
    fake, connected = FakeCuda(monkeypatch), set()
    fake.communicator, fake.loaded = 700 * MIB, 0

    def connect(group):
        if group not in connected:
            connected.add(group)
            fake.free -= fake.communicator

    def destroy(group):
        connected.remove(group)
        fake.free += fake.communicator

    def load():
        fake.free -= fake.loaded

    monkeypatch.setattr(device_memory, "_load_libraries", load)
    monkeypatch.setattr(device_memory, "_connect", connect)
    monkeypatch.setattr(device_memory, "_has_nccl", lambda: True)
    monkeypatch.setattr(torch.distributed, "new_group", lambda backend: f"a group of {backend}")
    monkeypatch.setattr(torch.distributed, "destroy_process_group", destroy)
    return fake


def test_communicators_and_libraries_are_taken_off_what_is_free(gpu):
    gpu.free, gpu.reserved, gpu.loaded = 70 * GIB, 2 * GIB, 300 * MIB
    memory = DeviceMemory.here()
    assert memory == DeviceMemory(80 * GIB, 72 * GIB - 1000 * MIB, 700 * MIB, measured=True)
    margin = int(0.02 * 80 * GIB)
    assert memory.cap(0) == memory.free - margin
    assert memory.cap(3) == memory.free - margin - 2100 * MIB
    assert DeviceMemory(GIB, 0, GIB, measured=True).cap(2) == 1


def test_what_did_not_drop_is_estimated(gpu):
    gpu.communicator = 0
    memory = DeviceMemory.here()
    assert (memory.communicator, memory.measured) == (COMMUNICATOR_BYTES, False)
    assert "(estimated)" in memory.describe(2)


def test_a_process_alone_has_no_communicators(gpu, monkeypatch):
    monkeypatch.setattr(device_memory, "_has_nccl", lambda: False)
    assert DeviceMemory.here() == DeviceMemory(80 * GIB, 70 * GIB, 0, measured=True)


def test_the_rank_with_the_least_counts():
    ranks = [
        DeviceMemory(80, 70, 5, measured=True),
        DeviceMemory(80, 60, 4, measured=True),
        DeviceMemory(90, 75, 7, measured=False),
    ]
    assert DeviceMemory.least(ranks) == DeviceMemory(80, 60, 7, measured=False)


def test_plans_say_what_a_rank_may_fill():
    memory = DeviceMemory(80 * GIB, 70 * GIB, GIB, measured=True)
    cluster = Cluster.default(4, "cuda")
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    problem = PlanningProblem(
        model="Sequential",
        parameters=describe_parameters(model),
        world_size=4,
        strategy=Strategy(),
        memory=None,
        batch="global",
        precision=None,
        optimizer=torch.optim.AdamW,
        cluster=cluster,
        device=torch.device("cpu"),
        comm_backend="nccl",
        device_memory=memory,
    )
    rows = (torch.rand(8, 8),)
    plan = plan_offline(problem, model, rows, None, None, None, lambda progress: None)
    assert plan.memory_cap == problem.cap_on(cluster) == memory.cap(0)
    (note,) = (note for note in plan.notes if note.startswith("memory: a rank may"))
    assert "70.0 GiB are free" in note
    assert f"note: {note}" in str(plan)
    divided = replace(problem, strategy=Strategy(tp=2))
    assert divided.cap_on(cluster) == memory.cap(2)
    assert divided.cap_on(replace(cluster, ranks_per_node=2)) == memory.cap(4)
    assert replace(problem, strategy=Strategy(pp=2)).cap_on(cluster) == memory.cap(4)
    assert replace(divided, memory=5).cap_on(cluster) == 5


@pytest.mark.parametrize(
    ("config", "nbytes"),
    [("", 32 * MIB), (":4096:2:16:8", 8 * MIB + 128 * 2**10), (":16:8", 128 * 2**10)],
)
def test_cublas_takes_the_workspace_that_the_environment_chooses(monkeypatch, config, nbytes):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", config)
    assert workspace_bytes("NVIDIA H100 80GB HBM3") == nbytes
    assert workspace_bytes("cpu") == 0
