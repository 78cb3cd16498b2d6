"""What cannot be captured trains under torch's own data parallelism."""

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.errors import FallbackWarning
from tests.harness.training import Pair, close, fixed, whole_state
from tests.harness.worlds import run


class Branching(nn.Module):
    """A model that asks for the value of a tensor; a ModuleList so that it has blocks.

    A reentrant checkpoint makes gradients of a block inside of the backward.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if x.grad_fn is None else checkpoint(block, x, use_reentrant=True)
            if x.abs().max() > 1e3:
                x = x / 2
        return x.square().mean()


class Penalised(Branching):
    """A model whose loss reads parameters where they are sharded."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(p.square().sum() for p in self.parameters())


class Choosing(nn.Module):
    """A model that chooses a block by its first layer, and never uses the last one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.blocks[int(y[0, 0].item() > 0)](y).square().mean()


def rows(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(6, 4, generator=generator, dtype=torch.float64)


def plain() -> dict[str, Tensor]:
    model = Branching().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(4):
        loss = model(rows(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.state_dict()


def train(rank: int, world_size: int, early: bool, options: dict[str, Any]) -> Any:
    given = {"example_inputs": (rows(0),)} if early else {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = autopar.compile(Branching().double(), **given, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(4):
            loss = model(rows(step))
            optimizer.zero_grad()  # after the call, as many loops do
            loss.backward()
            optimizer.step()
    said = [str(w.message) for w in caught if w.category is FallbackWarning]
    return whole_state(model), said


def replace_gradients(rank: int, world_size: int) -> None:
    """A script puts new tensors in the places of gradients, then accumulates."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pair = Pair(Branching, strategy="auto", fallback=True)
    for step in range(6):
        for model in pair.models:
            model(rows(step)).backward()
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad * 0.5
        pair.check_gradients()
        if step % 3 == 2:
            pair.step()
    pair.check_state()


@pytest.mark.slow
def test_gradients_that_a_script_replaces_are_added_to() -> None:
    run(replace_gradients, 2)


@pytest.mark.parametrize(
    ("early", "options", "engine"),
    [
        (False, {"strategy": "auto"}, "DistributedDataParallel"),
        (True, {"strategy": "auto"}, "DistributedDataParallel"),
        (False, {"strategy": "ddp"}, "DistributedDataParallel"),
        (True, {"strategy": "zero3"}, "fully_shard"),
        (True, {"memory": 1000}, "fully_shard"),  # of 1280 bytes, which ranks may share
    ],
)
def test_trains_as_the_plain_model(early: bool, options: dict[str, Any], engine: str) -> None:
    want = plain()
    for rank, (state, said) in enumerate(run(train, 2, early=early, options=options)):
        assert len(said) == (1 if rank == 0 else 0)
        assert all(f"torch's {engine} instead" in text for text in said)
        assert all("x.abs().max() > 1e3" in text for text in said)
        assert list(state) == list(want)
        for name in want:
            torch.testing.assert_close(state[name], want[name], rtol=1e-9, atol=1e-12)


def accumulate(rank: int, world_size: int, early: bool) -> None:
    """Ranks with unlike rows and branches, gradients held back, parameters that go unused."""
    given = {"example_inputs": (rows(0),)} if early else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pair = Pair(Choosing, strategy="auto", fallback=True, **given)
    reduced = []
    for _ in range(2):
        for step in range(3):
            x = rows(step)[:5]
            own = [pair.plain(part) * len(part) for part in x.tensor_split(world_size)]
            (sum(own) / 5).backward()
            with nullcontext() if step == 2 else pair.parallel.no_sync():
                loss = pair.parallel(x)
                loss.backward()
            close(loss, sum(own) / 5)
        pair.check_gradients()
        nn.utils.clip_grad_norm_(pair.parallel.parameters(), 1.0)
        nn.utils.clip_grad_norm_(pair.plain.parameters(), 1.0)
        reduced.append(pair.parallel.blocks[2].weight.grad)
        pair.step()
        with torch.inference_mode():
            close(pair.parallel.eval()(rows(9)[:1].repeat(2, 1)), pair.plain(rows(9)[:1]))
        pair.parallel.train()
    assert reduced == [None, None]
    pair.check_state()


@pytest.mark.parametrize("early", [False, True])
def test_branches_accumulation_and_uneven_rows(early: bool) -> None:
    run(accumulate, 2, early=early)


class Recurrent(nn.Module):
    """Recurrent layers keep lists of their parameters; one bias is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.LSTM(4, 4, 2)
        self.last = nn.Linear(4, 4)
        self.last.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(self.layers(x.unsqueeze(0))[0])
        return (y / 2 if y.abs().max() > 1e3 else y).square().mean()


def penalise_outside(rank: int, world_size: int, options: dict[str, int]) -> None:
    """Gradients of penalties add to those of the model: before, beside and after its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pair = Pair(Recurrent, strategy=fixed(**options), fallback=True)
    for step in range(3):
        for model in pair.models:
            trained = [p for p in model.parameters() if p.requires_grad]
            early = sum(p.square().sum() for p in trained)
            trained[0].sum().backward()
            late = sum(p.pow(3).sum() for p in trained)
            (early + model(rows(step)) + late).backward()
            with model.no_sync() if step == 1 and model is pair.parallel else nullcontext():
                model(rows(step + 3)).backward()
            trained[1].sum().backward()
            model(rows(step + 6)).backward()
        pair.check_gradients()
        pair.step()
    pair.check_state()


@pytest.mark.parametrize("options", [{"zero": 0}, {"tp": 2}, {"pp": 2}], ids=str)
def test_penalties_of_the_loop_are_trained(options: dict[str, int]) -> None:
    run(penalise_outside, 2, options=options)


def shard_with_gradients(rank: int, world_size: int) -> Tensor:
    model = Branching().double()
    model(rows(0)).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = autopar.compile(model, strategy="zero3", example_inputs=rows(0))
    gradient: Any = compiled.blocks[0].weight.grad
    return gradient.full_tensor()


def test_gradients_of_the_plain_model_stay() -> None:
    model = Branching().double()
    model(rows(0)).backward()
    for gradient in run(shard_with_gradients, 2):
        torch.testing.assert_close(gradient, model.blocks[0].weight.grad)


class Rows(nn.Module):
    """A model that asks for a value and returns rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.last(y / 2 if y.abs().max() > 1e3 else y)


def loss_outside(rank: int, world_size: int, early: bool) -> None:
    """The loss is a mean over the rows that each rank is returned, unlike numbers of them."""
    given = {"example_inputs": (rows(0)[:5],)} if early else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pair = Pair(Rows, strategy="ddp", fallback=True, **given)
    for step in range(3):
        x = rows(step)[:5]
        for model in pair.models:
            model(x).square().mean().backward()
        pair.check_gradients()
        pair.step()
    pair.check_state()


@pytest.mark.parametrize("early", [False, True])
def test_rows_that_are_returned_count_by_the_share_of_their_rank(early: bool) -> None:
    run(loss_outside, 2, early=early)


class Tied(Branching):
    """A weight of two blocks, one bias of a block and the model, and a block of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.extend([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.blocks[2].weight = self.blocks[0].weight
        self.bias = self.blocks[1].bias

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.bias)


def train_tied(rank: int, world_size: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pair = Pair(Tied, strategy="zero3", fallback=True, example_inputs=(rows(0),))
    for step in range(3):
        for model in pair.models:
            model(rows(step)).backward()
        pair.step()
    pair.check_state()


def test_tied_parameters_stay_tied_when_sharded() -> None:
    run(train_tied, 2)


def penalise(rank: int, world_size: int) -> None:
    model = autopar.compile(Penalised(), strategy="zero3", example_inputs=rows(0).float())
    model(rows(0).float()).backward()


def test_a_sharded_loss_is_refused() -> None:
    for error, said in run(penalise, 2, expect_errors=True):
        assert error in ("StrategyError", "BatchError")
        assert "DTensor" in said


def give_differently(rank: int, world_size: int) -> None:
    autopar.compile(Branching().double(), strategy="ddp")(rows(rank))


def test_different_batches_are_found() -> None:
    for answer in run(give_differently, 2, expect_errors=True):
        assert answer[0] == "DisagreementError"


def test_alone_it_runs_as_it_is() -> None:
    state, said = train(0, 1, early=False, options={"strategy": "auto"})
    assert "runs the model as it is" in said[0]
    torch.testing.assert_close(state, dict(plain()))


def shard_late(rank: int, world_size: int) -> None:
    autopar.compile(Branching(), strategy=fixed(3))(rows(0).float())


def test_sharding_late_is_refused() -> None:
    for answer in run(shard_late, 2, expect_errors=True):
        assert answer[0] == "StrategyError"
        assert "example_inputs" in answer[1]


class Scaled(Branching):
    """A model with a scalar parameter, which fully_shard refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)


def shard_scalars(rank: int, world_size: int) -> None:
    autopar.compile(Scaled().double(), strategy="zero3", example_inputs=(rows(0),))


def test_what_sharding_refuses_is_told() -> None:
    for kind, message in run(shard_scalars, 2, expect_errors=True):
        assert kind == "StrategyError"
        assert "its parameter scale has no dim" in message
        assert 'strategy="ddp"' in message


class Writing(Branching):
    """A model whose forward changes a parameter in place."""

    def __init__(self, write: str) -> None:
        super().__init__()
        self.write = write
        self.words = nn.Embedding(5, 4, max_norm=0.5 if write == "max_norm" else None)
        self.tokens = nn.Embedding(5, 4, sparse=write == "sparse")

    def forward(self, x: Tensor) -> Tensor:
        if self.write == "data":
            self.words.weight.data.clamp_(-0.1, 0.1)
        index = torch.arange(len(x)) % 5
        return super().forward(x + self.words(index) + self.tokens(index))


def train_writing(rank: int, world_size: int, write: str) -> str:
    model = autopar.compile(Writing(write).double(), strategy="zero3", example_inputs=(rows(0),))
    try:
        model(rows(0)).backward()
    except autopar.AutoparError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize(
    ("write", "said"),
    [
        ("max_norm", "changes its parameter words.weight"),
        ("data", "changes its parameter words.weight"),
        ("sparse", "is sparse"),
        ("nothing", "trained"),
    ],
)
def test_changes_in_forward_that_sharding_drops_are_refused(write: str, said: str) -> None:
    for told in run(train_writing, 2, write=write):
        assert said in told


class Renormed(nn.Module):
    """Its rows decide which vectors are made shorter in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.vectors, self.out = nn.Embedding(12, 4, max_norm=0.5), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.vectors(x)).square().mean()


def renorm(rank: int, world_size: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        model = autopar.compile(Renormed(), strategy="ddp")
        with pytest.raises(autopar.StrategyError, match=r"its parameter vectors.weight in place"):
            model(torch.arange(12).reshape(6, 2))


def test_parameters_that_rows_change_are_refused() -> None:
    run(renorm, 2)
