"""Copies to and from host memory, timed on a GPU that is not there."""

from pathlib import Path

import pytest
import torch

from autopar.cli import measure as command
from autopar.cli.main import main
from autopar.core.ir.messages import FROM_HOST, TO_HOST
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.measurement import host_copy_bench
from autopar.cost_model.measurement.host_copy_bench import COMPUTE, measure_host
from autopar.cost_model.storage import COPIES
from tests.harness.fake_cuda import FakeCuda

RATE, PIECE_S = 20e9, 1e-3
STARTS_S = {TO_HOST: 1e-5, FROM_HOST: 3e-5}
ON_COMPUTE, BESIDE_COMPUTE, BOTH_WAYS = 1.1, 1.2, 1.5


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda(monkeypatch, host_copy_bench)

    class Link:
        """Work takes longer if another stream is busy as it starts."""

        def __init__(self, device: torch.device) -> None:
            self.streams = {name: torch.cuda.Stream(device) for name in (*COPIES, COMPUTE)}

        def busy(self, name: str) -> bool:
            return self.streams[name].free_at > fake.free_at

        def copy(self, kind: str, nbytes: int) -> None:
            (other,) = set(COPIES) - {kind}
            slower = BOTH_WAYS if self.busy(other) else 1.0
            slower *= BESIDE_COMPUTE if self.busy(COMPUTE) else 1.0
            fake.launch(slower * (STARTS_S[kind] + nbytes / RATE), 1e-6)

        def compute(self) -> None:
            fake.launch(PIECE_S * (ON_COMPUTE if any(map(self.busy, COPIES)) else 1.0), 1e-6)

    monkeypatch.setattr(host_copy_bench, "HostLink", Link)
    return fake


def test_a_gpu_gives_the_times_put_in(gpu: FakeCuda) -> None:
    host = measure_host(torch.device("cuda"), 0.05)
    assert host.provenance.startswith("measured ")
    for kind, start_s in STARTS_S.items():
        for size in (1 << 16, 1 << 24, 1 << 28):
            assert host.seconds(kind, size).seconds == pytest.approx(start_s + size / RATE)
    factors = host.on_compute, host.beside_compute, host.both_ways
    assert factors == pytest.approx((ON_COMPUTE, BESIDE_COMPUTE, BOTH_WAYS), rel=0.02)


def test_autopar_measure_times_them_on_gpus(
    gpu: FakeCuda,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(command, "measure", lambda **options: Cluster.default(1, "cuda"))
    assert main(["measure", "--nproc", "1", "--output", str(tmp_path / "here.json")]) == 0
    shown = capsys.readouterr().out
    assert shown.index("to host") < shown.index("from host")
    host = Cluster.load(tmp_path / "here.json").host
    assert host is not None
    assert host.both_ways == pytest.approx(BOTH_WAYS, rel=0.02)
