"""Keys of cached times follow every switch that chooses a kernel."""

import json
from types import SimpleNamespace

import pytest
import torch

from autopar.core.ir.roles import Input, Output
from autopar.core.ir.signature import signature
from autopar.cost_model import disk_cache
from autopar.cost_model.host import Host
from autopar.cost_model.kernels.settings import kernel_settings
from autopar.cost_model.measurement.operator_times import OperatorTimes
from autopar.cost_model.measurement.timing_context import Timing
from autopar.cost_model.memory.workspace import Workspace
from tests.cost_model.sketch import Sketch, aten
from tests.harness.fake_cuda import NAME, FakeCuda

cudnn = torch.backends.cudnn


def test_entries_of_a_cpu_at_its_defaults_keep_their_key(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    host = Host.here()
    facts = {"device": "cpu", "model": host.cpu, "threads": host.threads, "sharing": 1}
    facts["torch"] = host.torch
    old = {"seconds": 1.0, "flops": 0.0, "nbytes": 8, "day": "2026-01-01", "rehearsed": True}
    path = tmp_path / "operators" / f"{disk_cache.digest(facts)}.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"setting": facts, "times": {"aten.sin": old}, "alone": {}}))
    assert OperatorTimes.load("cpu").times == {"aten.sin": Timing(**old)}
    torch.use_deterministic_algorithms(True)
    try:
        assert OperatorTimes.load("cpu").times == {}
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision="tf32")),
        (cudnn, "benchmark", True),
        (cudnn, "deterministic", True),
        (torch, "get_float32_matmul_precision", lambda: "high"),
        (torch, "are_deterministic_algorithms_enabled", lambda: True),
        (torch.backends.cuda, "flash_sdp_enabled", lambda: False),
        (torch.backends.cuda, "cudnn_sdp_enabled", lambda: False),
        (cudnn, "version", lambda: 91002),
        (torch.version, "cuda", "99.0"),
        ("properties", "clock_rate", 1_200_000),
        ("properties", "multi_processor_count", 16),
        ("gpu", "name", "NVIDIA H200"),
    ],
)
def test_every_switch_and_fact_of_a_gpu_is_in_the_key(monkeypatch, tmp_path, owner, name, value):
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    gpu = FakeCuda(monkeypatch)
    OperatorTimes.load("cuda").save()
    Workspace.load("cuda").save()
    owner = {"properties": gpu.properties, "gpu": gpu}.get(owner, owner)
    monkeypatch.setattr(owner, name, value, raising=False)
    OperatorTimes.load("cuda").save()
    Workspace.load("cuda").save()
    assert len(list(tmp_path.glob("operators/*.json"))) == 2
    assert len(list(tmp_path.glob("scratch/*.json"))) == 2


def test_mixed_switches_of_old_and_new_do_not_fail(monkeypatch):
    assert kernel_settings("cpu") == ""

    def refuse():
        raise RuntimeError("you have used mix of the legacy and new APIs")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", refuse)
    assert kernel_settings("cpu") == "float32_matmul_precision=mixed"


def test_times_of_a_cpu_leave_the_gpu_alone(monkeypatch):
    """Asking a GPU for its name takes hundreds of megabytes of it for a context."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("get_device_name", "get_device_properties", "current_device", "mem_get_info"):
        monkeypatch.setattr(torch.cuda, name, lambda *a: pytest.fail("the GPU was asked"))
    g = Sketch()
    total = g.call(aten.sum.default, g.take(Input(0), 8))
    graph = g.give({Output(0): total})
    assert OperatorTimes.load("cpu").measure([graph]).seconds(total).kind == "measured"
    assert Workspace.load("cpu").measure([graph]).nbytes


def test_keys_are_the_same_for_the_gpus_of_all_ranks():
    g = Sketch()
    x = g.take(Input(0), 8)
    first, second, host = (
        g.call(aten._to_copy.default, x, device=torch.device(*where))
        for where in (("cuda", 0), ("cuda", 1), ("cpu",))
    )
    assert signature(first) == signature(second) != signature(host)
    assert "device=device(type='cpu')" in signature(host)


def test_a_model_on_a_cpu_tells_nothing_about_the_gpu_beside_it(monkeypatch):
    FakeCuda(monkeypatch)
    assert OperatorTimes.load(NAME).present
    assert not OperatorTimes.load(NAME, runs_on="cpu").present
    assert not Workspace.load(NAME, runs_on="cpu").present
    assert Workspace.load("NVIDIA A100-SXM4-80GB").setting["model"] == "NVIDIA A100-SXM4-80GB"
