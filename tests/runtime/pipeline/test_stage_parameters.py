"""What each rank of a pipeline holds: layout, state dicts, checkpoints that move, clipping."""

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

import autopar
from autopar.core.ir.mesh_levels import DATA_AXIS
from autopar.core.plan.layout import Layout
from autopar.core.plan.pipeline import Pipeline
from autopar.core.plan.plan import Plan
from autopar.runtime.module import DistributedModule
from autopar.runtime.parameters.distribute import is_remote
from tests.harness.models import MODELS
from tests.harness.training import ADAMW, Pair, close, fixed, whole, whole_state
from tests.harness.worlds import run
from tests.training.test_state import spoiled

GPT = MODELS["gpt"]
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def make() -> nn.Module:
    return GPT.make().double()


def plan_of(world_size: int, pp: int = 1, zero: int = 0, **axes: int) -> Plan:
    """A plan with the stages cut by hand; the tied embedding is used on the last one too."""
    strategy = fixed(zero, **axes)
    inputs = GPT.batch(4, 0)[0]
    plan = autopar.plan(make(), world_size // pp, example_inputs=inputs, strategy=strategy)
    if pp == 1:
        return plan
    names = [name for name, _ in make().named_parameters()]
    uses = {name: (i * pp // len(names),) for i, name in enumerate(names)}
    uses["embedding.token.weight"] = (0, pp - 1)
    pipeline = Pipeline(pp, "1f1b", 2, uses=tuple(uses.items()))
    mesh = (("pp", pp), *plan.mesh)
    return replace(plan, world_size=world_size, mesh=mesh, pipeline=pipeline)


class Tied(nn.Module):
    """A model of two layers with the same parameters, which the first stage holds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.linear(x).relu()).square().mean()


def train_tied(rank: int, world_size: int, early: bool) -> bool:
    """Whether this rank has nothing to train."""
    x = torch.randn(6, 4, dtype=torch.float64)
    given = {"example_inputs": (x,)} if early else {}
    pair = Pair(Tied, strategy=fixed(0, pp=2), **given)
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(6, 4, dtype=torch.float64)
        for model in pair.models:
            model(x).backward()
        nn.utils.clip_grad_norm_(pair.plain.parameters(), 1e-2)
        pair.parallel.clip_grad_norm_(1e-2)
        pair.step()
    pair.check_state()
    return all(is_remote(p) for p in pair.parallel.parameters())


@pytest.mark.parametrize("early", [False, True])
def test_a_stage_without_parameters_trains(early: bool) -> None:
    assert sum(run(train_tied, 2, early=early)) == 1


class FrozenHead(nn.Module):
    """A trained layer, then a larger one that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(8, 8).double()
        self.head = nn.Linear(8, 8).double().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).relu()).square().mean()


def train_under_frozen_head(rank: int, world_size: int) -> list[str]:
    """Parameters that this rank holds; its optimizer is made before ranks have a plan."""
    models = [FrozenHead(), autopar.compile(FrozenHead(), strategy=fixed(0, pp=2))]
    trained = [[p for p in each.parameters() if p.requires_grad] for each in models]
    optimizers = [torch.optim.SGD(each, lr=0.1) for each in trained]
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(6, 8, dtype=torch.float64)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()
    whole_state = models[1].full_state_dict()
    for name, value in models[0].state_dict().items():
        close(whole_state[name], value)
    return [name for name, p in models[1].named_parameters() if not is_remote(p)]


def test_a_stage_may_train_nothing() -> None:
    assert ["head.weight", "head.bias"] in run(train_under_frozen_head, 2)


# -- what a rank holds -------------------------------------------------------------------------


def check_held(model: DistributedModule, plan: Plan, rank: int) -> None:
    assert plan.pipeline is not None
    held = plan.pipeline.held(Layout(plan).coordinate(rank)["pp"])
    assert {name for name, p in model.named_parameters() if not is_remote(p)} == held


def keep_whole_state(rank: int, world_size: int, plans: list[Plan]) -> None:
    """Plain names and values go in and out; a tied weight stays one."""
    state = make().state_dict()
    previous = None
    for plan in plans:
        model = autopar.compile(spoiled(make()), plan=plan)
        check_held(model, plan, rank)
        assert model.data_parallel_size == plan.dp_size
        assert model.data_parallel_rank == Layout(plan).coordinate(rank)[DATA_AXIS]
        assert not model.load_state_dict(state).missing_keys
        assert list(model.state_dict()) == list(state)
        close(whole_state(model), state, 0)
        assert model.head.weight is model.embedding.token.weight
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict({})
        with pytest.raises(RuntimeError, match="size mismatch"):
            model.load_state_dict({**state, "norm.weight": torch.zeros(5)})
        if previous is not None:  # sharded on another mesh
            model.load_state_dict(spoiled(previous).state_dict())
            close(whole_state(model), whole_state(previous), 0)
        previous = model


@pytest.mark.slow
def test_state_dicts_are_of_the_whole_model() -> None:
    run(keep_whole_state, 2, plans=[plan_of(2, 2)])
    run(keep_whole_state, 4, plans=[plan_of(4, 2, 3), plan_of(4, 2, 3, tp=2), plan_of(4, 4)])


def leave_out_others(rank: int, world_size: int, plan: Plan) -> None:
    """An optimizer made before the plan leaves out what is on other stages."""
    for zero in (None, 0):  # DTensors that wait for a plan, or plain tensors
        model = autopar.compile(make(), strategy=replace(fixed(zero), pp=2))
        optimizer = ADAMW(model.parameters())
        model.apply_plan(plan)
        assert {isinstance(p, DTensor) for p in model.parameters()} == {zero is None}
        close(whole_state(model), make().state_dict(), 0)
        own = {name: p for name, p in model.named_parameters() if not is_remote(p)}
        for parameter in own.values():
            parameter.grad = torch.ones_like(parameter)
        before = whole_state(model)
        optimizer.step()
        assert set(optimizer.state) == set(own.values())
        assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))
        changed = {n: bool((whole(p) != before[n]).all()) for n, p in own.items()}
        assert all(changed.values()), changed


def test_optimizers_leave_out_what_is_elsewhere() -> None:
    run(leave_out_others, 2, plan=plan_of(2, 2))


def groups_of_generators(rank: int, world_size: int, plan: Plan) -> None:
    """A group's parameters may be a generator, which is read once."""
    model = autopar.compile(make(), strategy=replace(fixed(0), pp=2))
    model.apply_plan(plan)
    halves = [lambda: islice(model.parameters(), 2), lambda: islice(model.parameters(), 2, None)]
    optimizer = torch.optim.SGD([{"params": half()} for half in halves], 0.1)
    late = torch.optim.SGD(halves[0](), 0.1)
    late.add_param_group({"params": halves[1]()})
    for made in (optimizer, late):
        assert [len(g["params"]) for g in made.param_groups] == [len(list(h())) for h in halves]
    with pytest.raises(TypeError, match="ordered"):
        late.add_param_group({"params": set(model.parameters())})


def test_optimizers_take_groups_of_generators() -> None:
    run(groups_of_generators, 2, plan=plan_of(2, 2))


# -- gradients by hand -------------------------------------------------------------------------


class Trained:
    """A plain model whose gradients are given to a distributed one, as a step of it would."""

    def __init__(self, plan: Plan) -> None:
        self.plain, self.model = make(), autopar.compile(make(), plan=plan)
        self.optimizers = [ADAMW(m.parameters()) for m in (self.plain, self.model)]

    def backward(self, step: int) -> None:
        """One step's gradients on both."""
        GPT.loss(self.plain(*GPT.batch(8, step)[0])).backward()
        gradients = {name: p.grad for name, p in self.plain.named_parameters()}
        for name, parameter in self.model.named_parameters():
            if not is_remote(parameter):
                parameter.grad = dtensor_like(gradients[name], parameter)

    def steps(self, steps: range) -> None:
        for step in steps:
            self.backward(step)
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()

    def check(self) -> None:
        close(whole_state(self.model), self.plain.state_dict(), 1e-12)


def dtensor_like(whole_gradient: Any, parameter: nn.Parameter) -> torch.Tensor:
    from autopar.runtime.parameters.distribute import distribute_like

    value = distribute_like(parameter, whole_gradient.clone())
    return value if isinstance(value, DTensor) else value.clone()


ORDERS = (2.0, 1.0, 3.0, float("inf"), -float("inf"), -1.0, 0.0)


def clip(rank: int, world_size: int, plans: list[Plan]) -> None:
    """The norm and the clipped gradients are those of the whole model, on every rank."""
    for plan in plans:
        pair = Trained(plan)
        for step, order in enumerate(ORDERS):
            pair.backward(step)
            want = nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.01, order)
            have = pair.model.clip_grad_norm_(0.01, order)
            assert not isinstance(have, DTensor)
            close(have, want, 1e-12)
            gradients = {n: p.grad for n, p in pair.plain.named_parameters()}
            own = {n: p for n, p in pair.model.named_parameters() if not is_remote(p)}
            close({n: p.grad for n, p in own.items()}, gradients, 1e-12)
            pair.plain.zero_grad()
        if rank == 0:
            next(iter(own.values())).grad *= float("nan")
        with pytest.raises(RuntimeError, match="cannot be clipped"):
            pair.model.clip_grad_norm_(0.01, error_if_nonfinite=True)


def test_gradients_are_clipped_over_all_stages() -> None:
    run(clip, 2, plans=[plan_of(2, 2), plan_of(2, 1, 3)])


# -- checkpoints -------------------------------------------------------------------------------


def save(rank: int, world_size: int, plan: Plan, folder: str) -> None:
    pair = Trained(plan)
    pair.steps(range(3))
    pair.check()
    model, optimizer = get_state_dict(pair.model, pair.optimizers[1], options=FLAT)
    checkpoint.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)


def resume(rank: int, world_size: int, plans: list[Plan], folder: str) -> None:
    for plan in plans:
        pair = Trained(plan)
        pair.steps(range(3))
        spoiled(pair.model)
        pair.optimizers[1] = optimizer = ADAMW(pair.model.parameters())
        parts = dict(
            zip(
                ("model", "optimizer"),
                get_state_dict(pair.model, optimizer, options=FLAT),
                strict=True,
            )
        )
        checkpoint.load(parts, checkpoint_id=folder)
        set_state_dict(
            pair.model,
            optimizer,
            model_state_dict=parts["model"],
            optim_state_dict=parts["optimizer"],
            options=FLAT,
        )
        pair.check()
        pair.steps(range(3, 6))
        pair.check()


@pytest.mark.slow
def test_checkpoints_move_between_pipelines(tmp_path: Path) -> None:
    first = plan_of(4, 2, 3, tp=2)
    run(save, 4, plan=first, folder=str(tmp_path))
    plans = [plan_of(4, zero=3), plan_of(4, tp=4), plan_of(4, 4), first]
    run(resume, 4, plans=plans, folder=str(tmp_path))
    run(resume, 1, plans=[plan_of(1)], folder=str(tmp_path))
