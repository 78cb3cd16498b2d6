"""Part `values`: the big model's values made block by block on rank 0 of a fake world."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import autopar
from autopar.core.plan.layout import Layout
from autopar.runtime.initialization import deferred, initialize
from autopar.runtime.initialization.deferred import DeferredValues
from autopar.runtime.pipeline.stage_parameters import distribute_plan_parameters
from autopar.runtime.process_groups import make_mesh
from benchmarks.starting.bytes import LiveBytes
from benchmarks.starting.llamas import BIG, on_meta, shares, tokens

RANKS = 8


def run() -> dict[str, dict[str, Any]]:
    """Start the big model on rank 0 of a fake world; no other rank answers."""
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    model, device = on_meta(BIG), torch.device("cpu")
    plan = autopar.plan(model, RANKS, example_inputs=tokens("meta"), strategy="zero3")
    awaited = DeferredValues.of(model, device, None)
    assert awaited is not None
    layout = Layout(plan)
    mesh = make_mesh(device, layout.storage, layout.shard_order)
    distribute_plan_parameters(model, plan, mesh)
    alone = patch.object(deferred, "broadcast_object", lambda source, decide: decide())
    unread = patch.object(initialize, "_lacks_values", lambda *_, **__: False)  # fakes have none
    unsent = patch.object(dist, "broadcast", lambda *_, **__: None)
    with alone, unread, unsent, FakeTensorMode(allow_non_fake_inputs=True), LiveBytes() as counted:
        awaited.give_values(plan, mesh)
    dist.destroy_process_group()
    count = sum(p.numel() for p in model.parameters())
    found = {"parameters": count, **shares(model), "peak": counted.peak, "now": counted.now}
    return {f"values, zero3, {RANKS} ranks": found}
