"""Memory of an optimizer: its state, and the temporaries of its step.

Both are measured by stepping it on a few small parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

import torch

from autopar._torch import pytree, storage_key
from autopar.core.common.block_storage import BUFFERS, split_blocks
from autopar.core.ir.graph import tensor_bytes
from autopar.core.operators.host_copies import standing_in
from autopar.cost_model.memory.allocation_tracker import track_allocations
from autopar.errors import StrategyError

_SIDE = 64
_TRIAL_NUMEL = 1 << 18  # blocks of 1 MiB are not rounded up on a GPU

Optimizer = torch.optim.Optimizer | Callable[..., torch.optim.Optimizer]


@dataclass(frozen=True)
class OptimizerMemory:
    """Memory of an optimizer, relative to its parameters.

    Attributes:
        state: size of each state tensor of a parameter, over the parameter's own size.
        counters: bytes of single numbers for each parameter, independent of its size.
        each: bytes of temporaries for each byte of the parameter being updated.
        before: bytes of temporaries for each byte of the previous parameter, freed late.
        every: bytes of temporaries for each byte of all parameters, where a step updates all at
            once (foreach).
        provenance: origin of the figures.
        stored: size of a parameter's states on storage, over the parameter's own size.
        block_bytes: bytes of parameters that are stepped at once; None for all.
    """

    state: tuple[float, ...] = (1.0, 1.0)
    counters: int = 4
    each: float = 2.0
    before: float = 1.0
    every: float = 0.0
    provenance: str = "modelled by AdamW on a CPU (torch.optim, one parameter at a time)"
    stored: float = 0.0
    block_bytes: int | None = None

    @classmethod
    def measure(
        cls, optimizer: Optimizer, device: str = "cpu", dtype: torch.dtype = torch.float32
    ) -> OptimizerMemory:
        """Steps an optimizer on one, two and three parameters and tracks its allocations.

        Without a GPU here, foreach runs on the CPU instead. An optimizer that refuses the CPU is
        stepped on the GPU.
        """
        with _stand_in(device):
            return cls._measured(optimizer, device, dtype)

    @classmethod
    def _measured(cls, optimizer: Optimizer, device: str, dtype: torch.dtype) -> OptimizerMemory:
        present = device == "cpu" or torch.cuda.is_available()
        foreach = not present
        first, there = _trial_somewhere(optimizer, device, dtype=dtype, foreach=foreach)
        more = (_trial(optimizer, there, n, dtype=dtype, foreach=foreach) for n in (2, 3))
        trials = [first, *more]
        parameter_bytes = tensor_bytes(trials[0].parameters[0])
        state, counters = trials[0].state(there)
        untracked = cls(
            state=tuple(tensor_bytes(t) / parameter_bytes for t in state),
            counters=sum(map(tensor_bytes, counters)),
            stored=getattr(trials[0].optimizer, "stored_bytes", 0) / parameter_bytes,
            block_bytes=getattr(trials[0].optimizer, "block_bytes", None),
            provenance="modelled: the step could not be tracked, a profiler was running",
        )
        try:
            peaks = [track_allocations(trial.step, there).peak for trial in trials]
        except RuntimeError:
            return untracked
        # `buffers` counts blocks of offloaded states, which a GPU's allocator holds. Rounding drops
        # the bytes of single numbers.
        held = untracked.stored if device == "cuda" else 0.0
        # The peaks are each + every, each + before + 2 every, and each + before + 3 every: so it
        # takes three parameters to tell them apart.
        one, two, three = (
            round(peak / parameter_bytes - held * count, 2) for count, peak in enumerate(peaks, 1)
        )
        every = three - two
        source = f"measured {date.today()} on {there}" if present else "modelled by foreach"
        return replace(
            untracked,
            each=one - every,
            before=two - one - every,
            every=every,
            provenance=source if present else f"{source} on this CPU",
        )

    def at_once(self, sizes: Sequence[int]) -> int:
        """Bytes of parameters that are stepped at once, of parameters of these sizes in bytes."""
        if self.block_bytes is None:
            return sum(sizes)
        blocks = split_blocks(sizes, self.block_bytes)
        return max((sum(sizes[block.start : block.stop]) for block in blocks), default=0)

    def buffers(self, sizes: Sequence[int]) -> int:
        """Bytes of the states in memory of an optimizer whose states lie on storage.

        One block is read, one is stepped, and two are written.
        """
        return round(self.stored * min(BUFFERS * self.at_once(sizes), sum(sizes)))

    def needed(self, sizes: Sequence[int]) -> int:
        """Bytes of a step's temporaries beside `every`, for parameters of these sizes in bytes."""
        pairs = zip(sizes, [0, *sizes], strict=False)
        return round(
            max((self.each * size + self.before * last for size, last in pairs), default=0)
        )


def optimizer_state_ratio(
    optimizer: Optimizer, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> float:
    """Bytes of optimizer state for each byte of parameter: AdamW 2, SGD 0, with momentum 1.

    Single numbers, such as the count of steps, are left out. The optimizer is a factory from
    parameters, or one to imitate. It is stepped on the device, "cpu" or "cuda", or on the other.
    """
    with _stand_in(device):
        trial, there = _trial_somewhere(optimizer, device, numel=_SIDE * _SIDE, dtype=dtype)
    parameter_bytes = tensor_bytes(trial.parameters[0])
    return sum(map(tensor_bytes, trial.state(there)[0])) / parameter_bytes


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
    """An optimizer with state, over parameters with gradients."""

    parameters: Sequence[torch.nn.Parameter]
    optimizer: torch.optim.Optimizer

    def step(self) -> object:
        return self.optimizer.step(lambda: 0.0)

    def state(self, device: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """State on a device: tensors, and single numbers."""
        inputs = [t for p in self.parameters for t in (p, p.grad) if t is not None]
        known = set(map(storage_key, inputs))
        leaves = pytree.tree_leaves(dict(self.optimizer.state))
        tensors = {storage_key(t): t for t in leaves if isinstance(t, torch.Tensor)}
        state = [t for at, t in tensors.items() if at not in known and t.device.type == device]
        return [t for t in state if t.numel() > 1], [t for t in state if t.numel() == 1]


def _stand_in(device: str) -> AbstractContextManager[None]:
    """Lets the CPU stand in for a GPU that is not here."""
    absent = device == "cuda" and not torch.cuda.is_available()
    return standing_in() if absent else nullcontext()


def _devices(device: str) -> list[str]:
    """The devices of this host, the wanted one first."""
    here = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    return sorted(here, key=lambda kind: kind != device)


def _trial_somewhere(optimizer: Optimizer, device: str, **options: Any) -> tuple[_Trial, str]:
    """The trial of one parameter on the first device that the optimizer accepts, and the device.

    Raises:
        StrategyError: the optimizer steps nowhere on this host.
    """
    errors: dict[str, Exception] = {}
    for there in _devices(device):
        try:
            return _trial(optimizer, there, 1, **options), there
        except Exception as error:
            errors[there] = error
    reasons = "; ".join(f"on {there}: {error}" for there, error in errors.items())
    raise StrategyError(
        f"optimizer {optimizer!r} cannot be made from parameters and stepped here ({reasons}). "
        "Pass a class such as torch.optim.AdamW, or functools.partial(torch.optim.SGD, "
        "momentum=0.9). For one that steps on GPUs only, plan on a host that has one, or pass an "
        "optimizer with as many bytes of state: torch.optim.AdamW for a fused Adam."
    ) from next(iter(errors.values()))


def _trial(
    optimizer: Optimizer,
    device: str,
    count: int,
    *,
    numel: int = _TRIAL_NUMEL,
    dtype: torch.dtype = torch.float32,
    foreach: bool = False,
) -> _Trial:
    """An optimizer after two steps over `count` parameters of `numel` elements."""
    shape = (_SIDE, numel // _SIDE)
    zeros = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(count)]
    parameters = list(map(torch.nn.Parameter, zeros))
    trial = _Trial(parameters, make_optimizer(optimizer, parameters))
    for group in trial.optimizer.param_groups if foreach else ():
        # Foreach is the default on a GPU.
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        trial.step()
    return trial
