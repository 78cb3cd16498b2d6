"""Recomputation or storage, whichever is faster, and only where memory is short."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.cost import ClusterError
from autopar.cost_model.curves.curve import Curve
from autopar.cost_model.measurement.storage_bench import measure_storage
from autopar.cost_model.storage import Storage
from benchmarks.offload.models import Model

BATCH = (torch.ones(2048, 64), torch.ones(2048, 64))
SIZES = (1 << 16, 1 << 26)


def storage(seconds_per_byte: float) -> Cluster:
    curve = Curve(SIZES, tuple(size * seconds_per_byte for size in SIZES))
    return replace(Cluster.default(1), storage=Storage(curve, curve, "modelled by a rate"))


def planned(seconds_per_byte: float, memory: int) -> autopar.Plan:
    strategy = autopar.Strategy(zero=0, offload="auto", offload_dir="/nvme")
    return autopar.plan(
        Model(64, 3),
        1,
        example_inputs=BATCH,
        strategy=strategy,
        memory=memory,
        cluster=storage(seconds_per_byte),
    )


def planned_on_gpus(memory: int, offload: str = "auto", **fields: Any) -> autopar.Plan:
    cluster = replace(Cluster.named("dgx-h100"), **fields)
    with torch.device("meta"):
        model, batch = Model(64, 3), tuple(torch.ones(1 << 14, 64) for _ in range(2))
    return autopar.plan(
        model,
        8,
        example_inputs=batch,
        strategy=autopar.Strategy(zero=0, recompute="none", offload=offload),  # type: ignore[arg-type]
        memory=memory,
        precision="fp32",
        cluster=cluster,
    )


def recomputed(plan: autopar.Plan) -> bool:
    return any(level != "none" for _, level in plan.recompute)


@pytest.mark.slow
def test_the_faster_of_recomputation_and_storage() -> None:
    roomy = planned(1e-14, 1 << 30)
    assert not roomy.offload
    assert not recomputed(roomy)
    assert roomy.prediction is not None
    cap = roomy.prediction.peak_bytes * 2 // 3
    fast, slow = planned(1e-14, cap), planned(1e-3, cap)
    assert fast.offload
    assert not recomputed(fast)
    assert recomputed(slow)
    assert not slow.offload
    assert {event[1] for event in fast.prediction.events} == {"compute", "storage"}  # type: ignore[union-attr]
    assert "blocks lie in /nvme" in fast.explain()
    assert "lie in /nvme" in str(fast)
    assert autopar.Plan.from_dict(fast.to_dict()).offload == fast.offload


@pytest.mark.slow
def test_gpus_offload_to_host_memory_as_far_as_there_is_any() -> None:
    roomy = planned_on_gpus(80 << 30)
    assert roomy.prediction is not None
    assert not roomy.offload
    assert not roomy.prediction.host_bytes
    everything = planned_on_gpus(80 << 30, "activations+parameters").prediction
    assert everything is not None
    cap = (roomy.prediction.needed_bytes + everything.needed_bytes) // 2
    plan = planned_on_gpus(cap)
    assert plan.offload
    assert plan.offload_dir == ""
    assert plan.prediction is not None
    locked = plan.prediction.host_bytes
    assert 0 < locked <= everything.host_bytes
    assert {"to host", "from host"} <= {event[1] for event in plan.prediction.events}
    assert "blocks lie in host memory" in plan.explain()
    assert "pins" in str(plan)
    assert "host memory: modelled by 49.6 GB/s" in str(plan.notes)
    again = autopar.Plan.from_dict(plan.to_dict())
    assert again.prediction is not None
    assert again.prediction.host_bytes == locked
    with pytest.raises(autopar.OutOfMemoryError):
        planned_on_gpus(cap, host_memory_bytes=8 * (locked // 4))


def test_a_cluster_keeps_its_storage_and_older_documents_have_none(tmp_path: Path) -> None:
    measured = replace(Cluster.default(1), storage=measure_storage(str(tmp_path), 0.01))
    document = measured.to_dict()
    again = Cluster.from_dict(document)
    assert again.storage == measured.storage
    assert again.storage is not None
    assert again.storage.read(1 << 26) > again.storage.read(1 << 16)
    assert min(again.storage.on_compute, again.storage.beside_compute) >= 1.0
    del document["storage"]["on_compute"], document["storage"]["beside_compute"]
    older = Cluster.from_dict(document).storage
    assert older is not None
    assert older.on_compute == older.beside_compute == 1.0
    with pytest.raises(ClusterError, match=r"\$\.storage.*from 1"):
        Cluster.from_dict({**document, "storage": {**document["storage"], "on_compute": 0.5}})
    del document["storage"]
    assert Cluster.from_dict(document).storage is None
    with pytest.raises(ClusterError, match=r"\$\.storage"):
        Cluster.from_dict({**document, "storage": {"write": 1}})
