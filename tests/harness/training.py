"""Training under a plan on real ranks, to be held against the plain model's `reference`."""

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import autopar
from autopar.runtime.parameters.distribute import is_remote
from benchmarks.memoize import memoized_capture
from tests.harness.models import MODELS, Batch
from tests.harness.reference import (
    Reference,
    batches,
    reference,
    relative_error,
    snapshot,
    train_steps,
    worst_error,
    worst_loss,
)

STEPS = 10
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)
SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
EXACT = {torch.float64: 1e-9, torch.float32: 1e-5}
"""The project's word for exact: float64 under AdamW, float32 under SGD with momentum."""


def fixed(zero: Any = 0, recompute: Any = "none", **options: Any) -> autopar.Strategy:
    """A strategy that leaves nothing to choose, so that nothing is measured."""
    given = {"gather_bytes": 1 << 14, "reduce_bytes": 1 << 14, "prefetch": 1, **options}
    return autopar.Strategy(zero=zero, recompute=recompute, **given)


class Setup(NamedTuple):
    """One way to train a model."""

    zero: Any = 0
    recompute: Any = "none"
    batch: str = "global"
    rows: int = 13
    more: dict[str, Any] = {}  # noqa: RUF012 (of the strategy, never changed)


def rows_of(batch: Batch, rank: int, ranks: int) -> Batch:
    """The rows of a rank, cut into equal parts: what batch="local" is given."""
    count = next(x for x in pytree.tree_leaves(batch) if isinstance(x, Tensor)).shape[0]
    assert count % ranks == 0
    own = slice(rank * count // ranks, (rank + 1) * count // ranks)

    def cut(leaf: Any) -> Any:
        return leaf[own] if isinstance(leaf, Tensor) and leaf.dim() else leaf

    return pytree.tree_map(cut, batch)


def whole(value: Any) -> Any:
    """A tensor without its mesh; every rank of the mesh must call it."""
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.detach().clone() if isinstance(value, Tensor) else value


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict as one process would have it."""
    return {name: whole(value) for name, value in model.state_dict().items()}


def optimizer_of(dtype: torch.dtype) -> Any:
    """What exactness is defined with."""
    return ADAMW if dtype == torch.float64 else SGD


def train(
    rank: int,
    world_size: int,
    name: str,
    dtype: torch.dtype,
    setup: Setup,
    steps: Iterable[int] = range(STEPS),
    **options: Any,
) -> Reference:
    """The same under a plan as `reference`; the optimizer is made before the first call."""
    given = batches(MODELS[name], steps, setup.rows, dtype)
    if setup.batch == "local":
        given = (rows_of(batch, rank, world_size) for batch in given)
    strategy = fixed(setup.zero, setup.recompute, **setup.more)
    return train_compiled(name, dtype, given, strategy=strategy, batch=setup.batch, **options)


def train_compiled(
    name: str, dtype: torch.dtype, given: Iterable[Any], **options: Any
) -> Reference:
    """Losses and final state of a model trained under `autopar.compile`'s options."""
    with shared_captures(name, dtype):
        case = MODELS[name]
        options = {"rows": case.rows, "fallback": False} | options
        model = autopar.compile(case.make().to(dtype), **options)
        optimizer = optimizer_of(dtype)(model.parameters())
        losses = train_steps(model, optimizer, case, given)
    return Reference(losses, whole_state(model))


@functools.cache
def _captures(name: str, dtype: torch.dtype) -> dict[Any, Any]:
    return {}


def shared_captures(name: str, dtype: torch.dtype) -> contextlib.AbstractContextManager[None]:
    """Captures one of `MODELS` once a process: no strategy changes a capture."""
    return memoized_capture(_captures(name, dtype))


class Pair:
    """A plain model and the same one compiled, which are to stay alike."""

    def __init__(
        self, made: Any, zero: Any = 3, dtype: torch.dtype = torch.float64, **options: Any
    ) -> None:
        make = MODELS[made].make if isinstance(made, str) else made
        self.plain: nn.Module = make().to(dtype)
        options = {"strategy": fixed(zero), "fallback": False, **options}
        self.parallel = autopar.compile(make().to(dtype), **options)
        self.optimizers = [optimizer_of(dtype)(m.parameters()) for m in self.models]

    @property
    def models(self) -> tuple[Any, Any]:
        """The plain model, then the compiled one."""
        return self.plain, self.parallel

    def step(self) -> None:
        """Both optimizers' step."""
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def gradients(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Whole gradients of both, by name, without those of other stages."""
        named = ([(n, p) for n, p in m.named_parameters() if not is_remote(p)] for m in self.models)
        plain, parallel = ({n: whole(p.grad) for n, p in each} for each in named)
        return plain, parallel

    def check_gradients(self, tolerance: float = 1e-9) -> None:
        """The same parameters have gradients, and they are equal."""
        want, have = self.gradients()
        nothing = {name for name, gradient in want.items() if gradient is None}
        assert nothing == {name for name, gradient in have.items() if gradient is None}
        close({n: g for n, g in have.items() if g is not None}, want, tolerance)

    def check_state(self, tolerance: float = 1e-9) -> None:
        """The state dicts are equal."""
        close(whole_state(self.parallel), self.plain.state_dict(), tolerance)


def close(have: Any, want: Any, tolerance: float = 1e-9) -> None:
    """Tensors, numbers, or dicts of tensors by name are equal up to a relative tolerance."""
    if not isinstance(have, dict):
        have, want = {"it": have}, {"it": want}
    errors = {n: relative_error(whole(have[n]), whole(want[n])) for n in have}
    assert all(e <= tolerance for e in errors.values()), errors


def train_all(
    rank: int, world_size: int, name: str, dtype: torch.dtype, setups: list[Setup]
) -> list[Reference]:
    return [train(rank, world_size, name, dtype, setup) for setup in setups]


@functools.cache
def plain(name: str, dtype: torch.dtype, rows: int, steps: int = STEPS) -> Reference:
    """The reference, once for all setups."""
    return reference(MODELS[name], steps, dtype, optimizer_of(dtype), rows)


def assert_same_training(got: Reference, want: Reference, tolerance: float, what: Any = "") -> None:
    """Every loss and every tensor of the final state agree."""
    loss = worst_loss(got, want)
    assert loss <= tolerance, f"{what}: losses differ by {loss:.1e}"
    state, name = worst_error(got.state, want.state)
    assert state <= tolerance, f"{what}: {name} differs by {state:.1e}"


def assert_same_bits(
    train: Callable[[autopar.Strategy], tuple[Any, nn.Module]], *strategies: autopar.Strategy
) -> None:
    """Training under two strategies gives equal losses and states, bit for bit."""
    results = []
    for strategy in strategies:
        torch.manual_seed(5)
        losses, model = train(strategy)
        results.append((losses, snapshot(model.state_dict())))
    torch.testing.assert_close(*results, rtol=0, atol=0)
