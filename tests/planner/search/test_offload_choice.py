"""Recomputation or storage, whichever is faster, and only where memory is short."""

from dataclasses import replace
from pathlib import Path

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
    assert "blocks lie on storage" in fast.explain()
    assert "lie in /nvme" in str(fast)
    assert autopar.Plan.from_dict(fast.to_dict()).offload == fast.offload


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
