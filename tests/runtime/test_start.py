"""The model's device decides how the ranks communicate; ranks that cannot are all told."""

import contextlib
import io
import os
import socket
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed as dist
from torch import nn

import autopar
from autopar.capture.model_info import device_of
from autopar.cli.script import default_processes
from autopar.core.common.groups import backend_of
from autopar.errors import CommunicationError, StrategyError
from autopar.runtime.start import RankDevice, check_ranks, ensure_process_group
from tests.harness.worlds import Raised, run

GPUS = (torch.device("cuda", 0), torch.device("cuda", 1))


def compiled_on_a_gpu_host(rank: int, world_size: int) -> Any:
    with (
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("torch.accelerator.is_available", return_value=False),  # asked by optimizers
    ):
        model = autopar.compile(nn.Linear(2, 2), strategy="ddp", timeout_s=33)
        x = torch.ones(2, 2)
        model(x).sum().backward()
    return dist.get_backend_config(), str(device_of(model)), model.weight.grad is not None


def test_a_model_on_the_cpu_uses_gloo_though_there_is_a_gpu() -> None:
    assert run(compiled_on_a_gpu_host, 2, init=False) == [("cpu:gloo,cuda:gloo", "cpu", True)] * 2


def started_on_gpus(rank: int, world_size: int, indices: list[int]) -> Any:
    """Starts with GPUs that are pretended, and tells how the group was asked for."""
    device = torch.device("cuda", indices[rank])
    asked: list[Any] = []
    nccl = SimpleNamespace(Options=SimpleNamespace)

    def properties(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(uuid=f"unit {device.index}")

    with (
        mock.patch("torch.cuda.set_device", asked.append),
        mock.patch("torch.cuda.get_device_properties", properties),
        mock.patch.object(dist, "init_process_group", lambda *a, **k: asked.append((a, k))),
        mock.patch.object(dist, "ProcessGroupNCCL", nccl, create=True),
    ):
        ensure_process_group(device, None, 33.0)
    current, of_thread, (arguments, options) = asked
    assert of_thread == current
    del options["store"]
    return current, arguments, options


def test_a_model_on_a_gpu_uses_gloo_and_nccl_bound_to_its_device() -> None:
    for rank, (current, arguments, options) in enumerate(
        run(started_on_gpus, 2, init=False, indices=[0, 1])
    ):
        assert current == options["device_id"] == GPUS[rank]
        assert arguments == ("cpu:gloo,cuda:nccl",)
        assert (options["rank"], options["world_size"]) == (rank, 2)
        assert options["timeout"].total_seconds() == 33
        assert options["pg_options"].is_high_priority_stream
        assert options["pg_options"]._timeout == options["timeout"]


def started_late(rank: int, world_size: int, timeout_s: float) -> str:
    """The error of a start that another rank comes to too late, and what the wait for it said."""
    if rank == 1:
        time.sleep(2.5)
    said = io.StringIO()
    with mock.patch("autopar.core.waiting.TELL_S", 0.3), contextlib.redirect_stderr(said):
        try:
            autopar.compile(nn.Linear(2, 2), strategy="ddp", timeout_s=timeout_s)
        except CommunicationError as error:
            return f"{error}\n{said.getvalue()}"
    return said.getvalue()


def test_a_start_says_whom_it_waits_for() -> None:
    first, _ = run(started_late, 2, init=False, timeout_s=60)
    assert "autopar: rank 0 waits for rank(s) [1] to call autopar.compile, for 5" in first


@pytest.mark.slow
def test_a_start_ends_without_a_rank_that_is_late() -> None:
    first, second = run(started_late, 2, init=False, timeout_s=1)
    assert "rank(s) [1] did not call autopar.compile within 1 s" in first
    assert "rank 1: waited for connections of all ranks for 1 s" in second


def test_a_store_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in place.items():
            monkeypatch.setenv(name, value)
        told = f"rank 1 did not reach the store at 127.0.0.1:{port} within 1 s"
        with pytest.raises(CommunicationError, match=told):
            ensure_process_group(torch.device("cpu"), None, 1.0)


def test_two_ranks_on_one_gpu_are_refused_on_all_ranks_before_nccl_starts() -> None:
    answers = run(started_on_gpus, 2, init=False, expect_errors=True, indices=[0, 0])
    assert all(isinstance(answer, Raised) for answer in answers)
    assert {answer.type for answer in answers} == {"StrategyError"}
    for answer in answers:
        assert "ranks [0, 1] all have their model on cuda:0" in answer.message
        assert 'int(os.environ["LOCAL_RANK"])' in answer.message


def test_two_ranks_may_share_a_gpu_over_gloo_and_the_number_of_one_on_two_hosts() -> None:
    check_ranks([RankDevice("cuda:0", "gloo", "host", "a")] * 2)
    check_ranks([RankDevice("cuda:0", "nccl", "host", unit) for unit in "ab"])


def test_ranks_on_other_kinds_of_device_or_without_a_backend_are_refused() -> None:
    cpu, gpu = RankDevice("cpu", "gloo", "host", ""), RankDevice("cuda:0", "nccl", "host", "a")
    with pytest.raises(StrategyError, match="on cpu on rank 0 and cuda:0 on rank 1"):
        check_ranks([cpu, gpu])
    with pytest.raises(StrategyError, match=r"rank\(s\) \[0, 1\] has no backend for cpu"):
        check_ranks([RankDevice("cpu", "", "host", "")] * 2)


def test_backends_follow_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [backend_of(torch.device(kind)) for kind in ("cpu", "cuda")] == ["gloo", "nccl"]
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: "cpu:gloo,cuda:nccl")
    assert [backend_of(torch.device(kind)) for kind in ("cpu", "cuda")] == ["gloo", "nccl"]


@pytest.mark.parametrize(
    ("current", "local_rank", "count", "wanted"), [(0, 3, 8, 3), (5, 3, 8, 5), (0, 3, 1, 0)]
)
def test_meta_models_go_to_the_gpu_of_their_process(
    monkeypatch: pytest.MonkeyPatch, current: int, local_rank: int, count: int, wanted: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setitem(os.environ, "LOCAL_RANK", str(local_rank))
    assert device_of(nn.Linear(2, 2, device="meta")) == torch.device("cuda", wanted)
    assert device_of(nn.Linear(2, 2)) == torch.device("cpu")


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(StrategyError, match="device='cuda:1', but torch finds no GPU"):
        device_of(nn.Linear(2, 2), "cuda:1")


def test_as_many_processes_as_gpus_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert default_processes() == 3
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert default_processes() == len(os.sched_getaffinity(0))
