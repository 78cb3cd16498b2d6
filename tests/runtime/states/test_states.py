"""Whole states of models and optimizers, and whole parameters in the user's module."""

import copy
import functools
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

import autopar
from tests.harness.models import GPT, MODELS
from tests.harness.reference import batches, train_steps
from tests.harness.training import ADAMW, close, fixed, shared_captures
from tests.harness.worlds import run

f64 = torch.float64

TWO = {
    "ddp": fixed(0),
    "zero3": fixed(3),
    "tp": fixed(0, tp=2),
    "cp": fixed(0, cp=2),
    "pp": fixed(0, pp=2, micro_batches=2, schedule="1f1b"),
}
FOUR = {
    "tp, zero3": fixed(3, tp=2),
    "pp, zero3": fixed(3, pp=2, micro_batches=2, schedule="interleaved"),
    "pp in a v, zero1": fixed(1, pp=2, micro_batches=2, schedule="zbv"),
}


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups with other options each, as fine-tuning scripts make them."""
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if "norm" not in n], "weight_decay": 0.1},
        {"params": [p for n, p in named if "norm" in n], "lr": 2e-3},
    ]


def trained(name: str, steps: range, model: nn.Module, optimizer: Any = None) -> Any:
    """The optimizer of a model after some steps."""
    optimizer = ADAMW(groups_of(model)) if optimizer is None else optimizer
    with shared_captures(name, f64):
        train_steps(model, optimizer, MODELS[name], batches(MODELS[name], steps, 12))
    return optimizer


@functools.cache
def plain_after(name: str, steps: int) -> tuple[nn.Module, Any]:
    model = MODELS[name].make().double()
    return model, trained(name, range(steps), model)


# -- state dicts -------------------------------------------------------------------------------


def whole_states(rank: int, world_size: int, name: str, strategies: dict[str, Any]) -> None:
    """Full states are the plain model's, move between plans, and train on as it does."""
    (two, _), (four, _) = (plain_after(name, steps) for steps in (2, 4))
    carried: Any = None
    for what, strategy in strategies.items():
        model = autopar.compile(MODELS[name].make().double(), strategy=strategy, fallback=False)
        if carried is None:
            optimizer = trained(name, range(2), model)
        else:
            buffer = io.BytesIO()
            torch.save(carried, buffer)
            buffer.seek(0)
            loaded = torch.load(buffer)
            assert str(model.load_full_state_dict(loaded[0])) == "<All keys matched successfully>"
            optimizer = ADAMW(groups_of(model))
            if what == "zero3":  # the others load before the plan is made
                model(*MODELS[name].batch(12, 0)[0])
                model.load_full_state_dict(loaded[0])
            model.load_full_optimizer_state_dict(optimizer, loaded[1])
        state, state_of_optimizer = whole = model.full_state_dict(), full_state(model, optimizer)
        check_plain(state, two, what)
        assert [g["params"] for g in state_of_optimizer["param_groups"]] == [
            [n for n, _ in two.named_parameters() if ("norm" in n) == is_norm]
            for is_norm in (False, True)
        ]
        trained(name, range(2, 4), model, optimizer)
        check_plain(model.full_state_dict(), four, what)
        check_plain(state, two, what)  # a copy
        carried = whole
    plain = MODELS[name].make().double()
    plain.load_state_dict(carried[0])
    optimizer = ADAMW(groups_of(plain))
    set_optimizer_state_dict(plain, optimizer, carried[1])
    trained(name, range(2, 4), plain, optimizer)
    check_plain(plain.state_dict(), four, "the plain model")


def full_state(model: Any, optimizer: Any) -> Any:
    found = model.full_optimizer_state_dict(optimizer)
    for state in found["state"].values():
        assert type(state["exp_avg"]) is torch.Tensor
    return found


def check_plain(state: dict[str, Any], plain: nn.Module, what: str) -> None:
    want = plain.state_dict()
    assert list(state) == list(want), what
    assert all(type(x) is torch.Tensor and x.device.type == "cpu" for x in state.values()), what
    close(state, want)
    if isinstance(plain, GPT):
        assert state["head.weight"].data_ptr() == state["embedding.token.weight"].data_ptr()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks"), [("gpt", 2), ("conv", 2), ("gpt", 4)], ids=lambda x: str(x)
)
def test_full_states_move_between_plans_and_the_plain_model(name: str, ranks: int) -> None:
    strategies = dict(TWO if ranks == 2 else FOUR)
    if name == "conv":
        strategies = {key: strategies[key] for key in ("zero3", "tp")}
        strategies["pp"] = fixed(0, pp=2, micro_batches=1, schedule="1f1b")
    run(whole_states, ranks, name=name, strategies=strategies)


# -- whole parameters --------------------------------------------------------------------------


def gather(rank: int, strategy: Any) -> None:
    """The plain model's submodules run, and what they change stays changed."""
    (two, _), (four, _) = (copy.deepcopy(plain_after("gpt", steps)) for steps in (2, 4))
    model = autopar.compile(MODELS["gpt"].make().double(), strategy=strategy, fallback=False)
    optimizer = trained("gpt", range(2), model)
    ids, targets = MODELS["gpt"].batch(12, 9)[0]
    x = two.embedding(ids).detach()
    with model.gathered() as whole, torch.no_grad():
        assert type(whole) is GPT
        close(whole.blocks[1](x), two.blocks[1](x))
        close(whole(ids, targets), two(ids, targets))
        close(model.state_dict(), two.state_dict())
        with pytest.raises(autopar.StrategyError, match="leave it before"):
            model(ids, targets)
    with model.gathered() as whole, torch.no_grad():
        whole.embedding.token.weight.mul_(0).add_(four.head.weight)  # tied to the head
        for name, parameter in four.named_parameters():
            if "blocks" in name:
                whole.get_parameter(name).data.copy_(parameter)
        whole.norm.weight = nn.Parameter(four.norm.weight.clone())
        with model.gathered():
            whole.norm.bias.data = four.norm.bias.clone()
    got = model.full_state_dict()
    close({n: x for n, x in got.items() if "position" not in n}, four.state_dict())
    close({n: x for n, x in got.items() if "position" in n}, two.state_dict())
    refuse(rank, model)
    close(model.full_state_dict(), got, 0)
    trained("gpt", range(1), model, optimizer)


def change_gathered(model: Any, change: Callable[[Any], object]) -> None:
    with model.gathered() as whole:
        whole.blocks[0].norm1.weight.data.zero_()
        change(whole)


def refuse(rank: int, model: Any) -> None:
    """Whatever cannot be kept is an error on every rank, and nothing changes."""

    def check(error: Any, match: str, change: Callable[[Any], object]) -> None:
        with pytest.raises(error, match=match):
            change_gathered(model, change)

    def fill(whole: Any) -> None:
        whole.blocks[0].norm1.bias.data.fill_(float(rank))

    def cut(whole: Any) -> None:
        whole.norm.weight = nn.Parameter(torch.zeros(3, dtype=f64))

    def add(whole: Any) -> None:
        whole.more = nn.Parameter(torch.zeros(3))

    def fail(whole: Any) -> None:
        if rank:
            raise ValueError("of one rank")

    check(autopar.DisagreementError, r"blocks\.0\.norm1\.bias", fill)
    check(autopar.StrategyError, r"float64\[\d+\] and is float64\[3\]", cut)
    check(autopar.StrategyError, "added or removed", add)
    del model.more
    check(ValueError if rank else autopar.DisagreementError, "of one rank", fail)


def gather_all(rank: int, world_size: int, names: list[str]) -> None:
    for name in names:
        gather(rank, TWO[name])


@pytest.mark.slow
def test_gathered_parameters_are_the_plain_models() -> None:
    run(gather_all, 2, names=["ddp", "zero3", "tp", "pp"])
