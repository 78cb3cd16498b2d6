"""Trials reuse groups, leave none behind, and go on where one plan runs out of memory on a rank."""

import contextlib
import pkgutil
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed as dist

import autopar
from autopar.core.plan.strategy import Strategy
from autopar.cost_model.cluster.cluster import Cluster
from autopar.session.race import benchmark_plans
from tests.harness.models import MODELS
from tests.harness.reference import Reference, batches, train_steps
from tests.harness.training import assert_same_training, optimizer_of, plain, whole_state
from tests.harness.worlds import run

ROWS, STEPS, f64 = 8, 2, torch.float64
GPT = MODELS["gpt"]
SEARCH = Strategy(recompute="none", micro_batches=1, search=("pp", "tp"))


def compiled(world_size: int, strategy: Strategy, trials: int, inputs_on: str = "cpu") -> Any:
    (args, _), *_ = batches(GPT, [0], ROWS, f64)
    args = tuple(x.to(inputs_on) for x in args)
    return autopar.compile(
        GPT.make().double(),
        strategy=strategy,
        example_inputs=args,
        cluster=Cluster.default(world_size),
        fallback=False,
        trials=trials,
    )


def trained(model: Any) -> Reference:
    optimizer = optimizer_of(f64)(model.parameters())
    losses = train_steps(model, optimizer, GPT, batches(GPT, range(STEPS), ROWS, f64))
    return Reference(losses, whole_state(model))


def fail(*args: Any, **kwargs: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def filled(rank: int, world_size: int, inside: str, where: str, at: int) -> Any:
    """Compile and train; a function fails inside one of the calls of another on rank 1."""
    calls, call = 0, pkgutil.resolve_name(inside)

    def count(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        full = rank == 1 and calls == at
        with mock.patch(where, fail) if full else contextlib.nullcontext():
            return call(*args, **kwargs)

    with mock.patch(inside.replace(":", "."), count):
        model = compiled(world_size, SEARCH, trials=3, inputs_on="meta")
    return trained(model), model.plan, calls


STEP = "autopar.session.race:_Runner.step"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inside", "where", "at"),
    [
        ("autopar.session.race:_Runners.add", "copy.deepcopy", 2),
        (
            "autopar.session.race:_Runners.add",
            "autopar.runtime.planned_module.distribute_plan_parameters",
            3,
        ),
        (STEP, "autopar.runtime.module.DistributedModule._run", 1),
        (STEP, "torch.autograd.backward", 9),
    ],
    ids=["copy", "shards", "forward", "backward"],
)
def test_a_plan_that_fills_one_rank_is_dropped_on_all(inside: str, where: str, at: int) -> None:
    want = plain("gpt", f64, ROWS, STEPS)
    answers = run(filled, 2, inside=inside, where=where, at=at)
    assert len({plan.digest() for _, plan, _ in answers}) == 1
    for found, plan, calls in answers:
        assert calls > at
        notes = [note for note in plan.notes if "rank(s) [1] ran out of memory" in note]
        assert len(notes) == 1, plan.notes
        assert any("2 plans that ran for" in note for note in plan.notes)
        assert_same_training(found, want, 1e-9)


def tried(rank: int, world_size: int) -> Any:
    made: list[Any] = []
    alive: set[Any] = set()

    def create(ranks: Any, *args: Any, call: Any = dist.new_group, **kwargs: Any) -> Any:
        made.append(tuple(ranks))
        group = call(ranks, *args, **kwargs)
        alive.update([group] if rank in ranks else [])
        return group

    def destroy(group: Any, call: Any = dist.destroy_process_group) -> None:
        alive.remove(group)
        call(group)

    def benchmark(*args: Any) -> Any:
        with (
            mock.patch.object(dist, "new_group", create),
            mock.patch.object(dist, "destroy_process_group", destroy),
        ):
            return benchmark_plans(*args)

    with mock.patch("autopar.session.select.benchmark_plans", benchmark):
        model = compiled(world_size, SEARCH, trials=3, inputs_on="meta")
    others = [Strategy(tp=2), Strategy(zero=3), Strategy(pp=2, micro_batches=2)]
    results = [trained(model), *(trained(compiled(world_size, each, 0)) for each in others)]
    return results, made, len(alive), model.plan.notes


@pytest.mark.slow
def test_groups_of_a_trial_are_shared_and_destroyed_and_meshes_are_made_anew() -> None:
    want = plain("gpt", f64, ROWS, STEPS)
    for results, made, left, notes in run(tried, 2):
        assert any("3 plans that ran for" in note for note in notes)
        assert (0, 1) in made
        assert len(made) == len(set(made))
        assert not left
        for found in results:
            assert_same_training(found, want, 1e-9)
