"""What an optimizer keeps for each parameter, and what it needs while it steps.

Both are found by stepping it on a few small parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

import torch

from autopar.cost_model.memory.allocation_tracker import track_allocations
from autopar.errors import StrategyError
from autopar.ir.graph import tensor_bytes

_SIDE = 64
_TRIAL = 1 << 18  # numbers in a parameter of a trial: blocks of 1 MiB are not rounded on a GPU

Optimizer = torch.optim.Optimizer | Callable[..., torch.optim.Optimizer]


@dataclass(frozen=True)
class OptimizerMemory:
    """Bytes of an optimizer, for parameters on one device.

    Attributes:
        state: what it keeps for a parameter: the size of each tensor, over the parameter's own.
        counters: bytes of single numbers that it keeps for a parameter, however large that is.
        each: bytes that it needs during a step for each byte of the parameter that is updated,
            if it updates one at a time.
        before: the same for each byte of the one before, which is let go of late.
        every: the same for each byte of all parameters, if it updates them at once.
        provenance: where these come from.
    """

    state: tuple[float, ...] = (1.0, 1.0)
    counters: int = 4
    each: float = 2.0
    before: float = 1.0
    every: float = 0.0
    provenance: str = "modelled by AdamW on a CPU (torch.optim, one parameter at a time)"

    @classmethod
    def measure(
        cls, optimizer: Optimizer, device: str = "cpu", dtype: torch.dtype = torch.float32
    ) -> OptimizerMemory:
        """Step an optimizer on one, two and three parameters, and see what it allocates.

        Args:
            optimizer: as for `optimizer_state_ratio`.
            device: type of the device that it is to run on, "cpu" or "cuda". Without a GPU here,
                its way of updating all parameters at once there (foreach) runs on the CPU.
            dtype: of the parameters: an optimizer may keep copies of them in another.
        """
        present = device == "cpu" or torch.cuda.is_available()
        there = device if present else "cpu"
        trials = [
            _trial(optimizer, there, count, dtype=dtype, foreach=not present) for count in (1, 2, 3)
        ]
        own = tensor_bytes(trials[0].parameters[0])
        state, counters = trials[0].state(there)
        kept = cls(
            state=tuple(tensor_bytes(t) / own for t in state),
            counters=sum(map(tensor_bytes, counters)),
            provenance="modelled: the step could not be tracked, a profiler was running",
        )
        try:
            needs = [track_allocations(trial.step, there).peak / own for trial in trials]
        except RuntimeError:
            return kept
        one, two, three = (round(need, 2) for need in needs)  # without the bytes of single numbers
        every = three - two
        return replace(
            kept,
            each=one - every,
            before=two - one - every,
            every=every,
            provenance=f"measured {date.today()} on {device}"
            if present
            else "modelled by foreach on this CPU",
        )

    def needed(self, sizes: Sequence[int]) -> int:
        """Bytes that a step needs beside `every`, for parameters of these sizes in this order."""
        steps = zip(sizes, [0, *sizes], strict=False)
        return round(max((self.each * own + self.before * last for own, last in steps), default=0))


def optimizer_state_ratio(optimizer: Optimizer, dtype: torch.dtype = torch.float32) -> float:
    """Bytes of optimizer state for each byte of parameter: AdamW 2, SGD 0, with momentum 1.

    Single numbers, such as the count of steps, are left out.

    Args:
        optimizer: a class or function that makes an optimizer from parameters, or an optimizer,
            of which one like it is made.
        dtype: of the parameters.
    """
    trial = _trial(optimizer, "cpu", 1, numbers=_SIDE * _SIDE, dtype=dtype)
    own = tensor_bytes(trial.parameters[0])
    return sum(map(tensor_bytes, trial.state("cpu")[0])) / own


def make_optimizer(
    optimizer: Optimizer, parameters: Iterable[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """A new optimizer of the same kind over these parameters."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return optimizer(parameters)
    accepted = inspect.signature(type(optimizer)).parameters
    options = {k: v for k, v in optimizer.defaults.items() if k in accepted}
    return type(optimizer)(parameters, **options)


@dataclass(frozen=True)
class _Trial:
    """An optimizer over parameters that have gradients; its state exists."""

    parameters: Sequence[torch.nn.Parameter]
    optimizer: torch.optim.Optimizer

    def step(self) -> object:
        """One more step."""
        return self.optimizer.step(lambda: 0.0)

    def state(self, device: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What it keeps on a device: tensors, and single numbers."""
        given = [t for p in self.parameters for t in (p, p.grad) if t is not None]
        own = {t.untyped_storage().data_ptr() for t in given}
        found = {t.untyped_storage().data_ptr(): t for t in _tensors(self.optimizer.state)}
        kept = [t for at, t in found.items() if at not in own and t.device.type == device]
        return [t for t in kept if t.numel() > 1], [t for t in kept if t.numel() == 1]


def _trial(
    optimizer: Optimizer,
    device: str,
    count: int,
    *,
    numbers: int = _TRIAL,
    dtype: torch.dtype = torch.float32,
    foreach: bool = False,
) -> _Trial:
    """An optimizer that has made two steps over `count` parameters of `numbers` numbers."""
    shape = (_SIDE, numbers // _SIDE)
    zeros = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(count)]
    parameters = list(map(torch.nn.Parameter, zeros))
    try:
        tried = make_optimizer(optimizer, parameters)
        if foreach:
            _at_once(tried)
        trial = _Trial(parameters, tried)
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            trial.step()
    except Exception as error:
        raise StrategyError(
            f"optimizer {optimizer!r} cannot be made from parameters and stepped: {error}. Pass a "
            f"class such as torch.optim.AdamW, or functools.partial(torch.optim.SGD, momentum=0.9)"
        ) from error
    return trial


def _at_once(optimizer: torch.optim.Optimizer) -> None:
    """Choose foreach where a GPU's default would."""
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested dicts and lists."""
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from _tensors(value)
    elif isinstance(state, (list, tuple)):
        for value in state:
            yield from _tensors(value)
