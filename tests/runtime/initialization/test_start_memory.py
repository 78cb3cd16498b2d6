"""Starting a model takes a rank its share and one block, measured and counted."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

import autopar
from autopar._torch import FakeTensorMode
from autopar.core.plan.layout import Layout
from autopar.runtime.initialization import deferred, initialize
from autopar.runtime.initialization.deferred import DeferredValues
from autopar.runtime.parameters.distribute import is_remote, local_part
from autopar.runtime.pipeline.stage_parameters import distribute_plan_parameters
from autopar.runtime.process_groups import make_mesh
from benchmarks.starting.bytes import LiveBytes
from benchmarks.starting.llamas import BIG
from examples.plan_llama import Llama, Size
from tests.harness.training import fixed
from tests.harness.worlds import run

SMALL = Size(width=256, inner=688, layers=8, heads=4, groups=4, vocabulary=512)
SLACK = 1 << 16
"""Bytes for states of generators and messages."""


def llama(size: Size, device: str = "meta") -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    with torch.device(device):
        model = Llama(size)
        tokens = torch.zeros(8, 8, dtype=torch.long)
    return model, (tokens, tokens)


def sizes(model: nn.Module) -> tuple[int, int]:
    """Bytes of this rank's parts, and of the largest unit."""
    params = dict(model.named_parameters())
    units = [sum(params[n].nbytes for n in unit.names) for unit in initialize.units_of(model)]
    return sum(local_part(p).nbytes for p in params.values() if local_part(p).numel()), max(units)


def start(rank: int, world_size: int, elsewhere: bool, **options: Any) -> None:
    model, tokens = llama(SMALL)
    given = tuple(torch.zeros_like(t, device="cpu") for t in tokens)
    parallel = autopar.compile(model, example_inputs=given, **options)
    assert parallel._execution.deferred is not None
    if elsewhere and rank == 0:  # as those of a model on another device are
        values = llama(SMALL, "cpu")[0].named_parameters()
        parallel._execution.deferred.elsewhere.update(values)
    elif elsewhere:
        deferred = parallel._execution.deferred
        deferred.elsewhere |= dict.fromkeys(deferred.awaiting)
    with LiveBytes() as counted:  # whichever thread of gloo frees a tensor
        parallel.materialize_parameters()
    assert parallel.plan is not None
    held = Layout(parallel.plan).parameters_on(rank)
    local = [local_part(p) for n, p in model.named_parameters() if held is None or n in held]
    share, (_, unit) = sum(x.nbytes for x in local), sizes(model)
    assert not any(is_remote(x) for x in local)
    assert elsewhere or counted.peak >= share  # else rank 0 has values already
    assert counted.peak <= share + unit + SLACK
    assert share < 0.6 * sum(p.nbytes for p in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_rank_never_has_more_than_its_share_and_one_block(elsewhere: bool) -> None:
    for strategy in (fixed(3), fixed(0, tp=2), fixed(0, pp=2)):
        run(start, 2, strategy=strategy, elsewhere=elsewhere)


@pytest.fixture
def fake_world() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=8)
    yield
    dist.destroy_process_group()


@pytest.mark.slow
def test_thirty_billion_parameters_start_on_eight_ranks(
    fake_world: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0, which initialises, in bytes of fake tensors; no other rank answers."""
    model, tokens = llama(BIG)
    assert sum(p.numel() for p in model.parameters()) > 30e9
    plan = autopar.plan(model, 8, example_inputs=tokens, strategy=fixed(3))
    monkeypatch.setattr(deferred, "broadcast_object", lambda source, decide: decide())
    monkeypatch.setattr(initialize, "_lacks_values", lambda *_, **__: False)  # needs values
    monkeypatch.setattr(dist, "broadcast", lambda *_, **__: None)
    awaited = DeferredValues.of(model, torch.device("cpu"), None)
    assert awaited is not None
    mesh = make_mesh(torch.device("cpu"), Layout(plan).storage, Layout(plan).shard_order)
    distribute_plan_parameters(model, plan, mesh)
    with FakeTensorMode(allow_non_fake_inputs=True), LiveBytes() as counted:
        awaited.give_values(plan, mesh)
    share, unit = sizes(model)
    whole = sum(p.nbytes for p in model.parameters())
    assert share == pytest.approx(whole / 8, rel=1e-3)
    assert share <= counted.now <= share + SLACK
    assert counted.peak <= share + unit + SLACK
    assert not any(is_remote(local_part(p)) for p in model.parameters())
