"""Initialising block by block draws the numbers that a whole model on one device draws."""

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import ModelError
from autopar.runtime.initialization.deferred import DeferredValues
from autopar.runtime.initialization.initialize import InitFunction, units_of
from tests.harness.architectures import ARCHITECTURES
from tests.harness.models import MODELS

CPU = torch.device("cpu")


def give_values(model: nn.Module, init_fn: InitFunction | None = None) -> nn.Module:
    torch.manual_seed(0)
    deferred = DeferredValues.of(model, CPU, init_fn)
    assert deferred is not None
    deferred.give_values(None, None)
    assert not deferred.awaiting
    return model


def assert_equal_bits(model: nn.Module, want: nn.Module) -> None:
    for have, expected in (
        (model.named_parameters, want.named_parameters),
        (model.named_buffers, want.named_buffers),
    ):
        given = dict(expected(remove_duplicate=False))
        for name, tensor in have(remove_duplicate=False):
            assert torch.equal(tensor, given[name]), name
            assert tensor.requires_grad == given[name].requires_grad


@pytest.mark.parametrize("name", ["gpt", "uneven", "encoder", "conv", "encdec"])
def test_values_are_those_of_the_constructor(name: str) -> None:
    """Batch norm, attention with `_reset_parameters`, recurrent and tied layers among them."""
    with torch.device("meta"):
        model = MODELS[name].make()
    tied = len(list(model.parameters()))
    assert_equal_bits(give_values(model), MODELS[name].make())
    assert len(list(model.parameters())) == tied


@pytest.mark.parametrize("name", ["llama", "modernbert", "t5", "resnet"])
def test_values_are_those_of_initialize_weights(name: str) -> None:
    """Rotary tables are computed again, and a model may initialise an embedding inside of it."""
    with torch.device("meta"):
        model, plain = ARCHITECTURES[name].make(), ARCHITECTURES[name].make()
    plain.to_empty(device="cpu")
    torch.manual_seed(0)
    (inner,) = plain.children()
    inner.initialize_weights()  # type: ignore[operator]
    inner.tie_weights()  # type: ignore[operator]
    assert_equal_bits(give_values(model), plain)


class Table(nn.Module):
    """A linear layer and a table that only its constructor computes."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4), persistent=persistent)
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool), persistent=persistent)


@pytest.mark.parametrize("persistent", [False, True])
def test_tensors_without_initialisation_are_named(persistent: bool) -> None:
    with torch.device("meta"):
        model = nn.Sequential(Table(persistent))
    with pytest.raises(ModelError, match=r"0.table, 0.mask .*init_fn="):
        give_values(model)


def test_tables_built_on_the_cpu_stay() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), Table(persistent=False))
    model[1].table = torch.arange(4)
    model[1].mask = torch.ones(4, dtype=torch.bool)
    give_values(model)
    assert model[1].table.tolist() == [0, 1, 2, 3]


class Rows(nn.Module):
    """Initialises all rows but one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight.data[1:])


def test_partly_initialised_tensors_are_named() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Rows())
    with pytest.raises(ModelError, match=r"0.weight on the meta device got no value"):
        give_values(model)


class Root(nn.Module):
    """Initialises a part outside of the blocks, and the blocks too if asked."""

    def __init__(self, blocks: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 4)
        self.initializes_blocks = blocks

    def reset_parameters(self) -> None:
        nn.init.constant_(self.head.bias, 5.0)
        if self.initializes_blocks:
            nn.init.zeros_(self.layers[1].weight)


def test_a_model_may_initialise_parts_outside_of_its_blocks() -> None:
    with torch.device("meta"):
        model = Root(blocks=False)
    plain = Root(blocks=False)
    torch.manual_seed(0)
    for layer in (*plain.layers, plain.head, plain):
        layer.reset_parameters()  # type: ignore[operator]
    assert_equal_bits(give_values(model), plain)


def test_a_model_that_initialises_its_blocks_is_refused() -> None:
    with torch.device("meta"):
        model = Root(blocks=True)
    with pytest.raises(ModelError, match=r"Root writes to tensors of other modules.*\[4, 4\]"):
        give_values(model)
    with torch.device("meta"):
        model = Root(blocks=True)
    assert all(p.eq(1).all() for p in give_values(model, init_fn=ones).parameters())


def ones(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.ones_(parameter)


def test_a_function_of_the_user_replaces_the_modules_own() -> None:
    """Also `_init_weights`; modules that it leaves alone take their own."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.fill_(3.0)
            module.bias.data.zero_()

    give_values(model, init)
    assert model[0].weight.eq(3).all()
    assert model[1].weight.eq(1).all()


def test_generators_stay_as_they_are() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    give_values(model)  # seeds with 0
    state: Tensor = torch.get_rng_state()
    torch.manual_seed(0)
    assert torch.equal(torch.get_rng_state(), state)


def test_units_are_blocks_in_order() -> None:
    with torch.device("meta"):
        model = MODELS["gpt"].make()
    names = [unit.modules[-1][0] for unit in units_of(model)]
    wanted = ["embedding", "dropout", "blocks.0", "blocks.1", "blocks", "norm", "head", ""]
    assert names == wanted
    owned = [name for unit in units_of(model) for name in unit.names]
    assert sorted(owned) == sorted(name for name, _ in model.named_parameters())
