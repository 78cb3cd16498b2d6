"""`UpdateCost`: time of the optimizer's step, and of autograd around each parameter."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from autopar._torch import dtensor_like
from autopar.cost_model.cost import Cost
from autopar.cost_model.curves.curve import Curve
from autopar.cost_model.kernels.roofline import Roofline
from autopar.cost_model.memory.optimizer_memory import make_optimizer

Optimizer = Callable[..., torch.optim.Optimizer]
Clock = Callable[[], float]
SIZES = (16, 1 << 14, 1 << 18, 1 << 21)
"""Elements of the stepped parameters: beyond 2**18 each temporary is fresh memory."""

COUNT, ROUNDS = 8, 5
BETWEEN = 1 << 24  # elements written between two steps, to clear the caches
TOTAL = 1 << 22  # most elements of all parameters of one size
DTENSOR_S = 3.5e-4  # AdamW on CPU, torch 2.13: 52 parameters took 18 ms longer


@dataclass(frozen=True)
class UpdateCost:
    """Time of an optimizer's step, and of autograd's work on gradients.

    Attributes:
        curve: seconds of the optimizer for one parameter, by its bytes.
        per_gradient: seconds to accumulate and free one gradient of any size.
        per_dtensor: extra seconds for each DTensor parameter: to unwrap it, to wrap its gradient
            and to step it.
        provenance: origin of the figures.
    """

    curve: Curve
    per_gradient: float
    per_dtensor: float
    provenance: str

    @classmethod
    def modelled(cls, line: Roofline, state_ratio: float = 2.0) -> UpdateCost:
        """One kernel that reads parameter, gradient and states, and writes all but the gradient.

        `state_ratio` are the bytes of states for each byte of a parameter, 2 for AdamW.
        """
        sizes, moved = tuple(4 * numel for numel in SIZES), 3.0 + 2.0 * state_ratio
        curve = Curve.smooth(sizes, [line.seconds(0.0, moved * size) for size in sizes])
        return cls(curve, 0.0, 0.0, f"modelled by {line.source}")

    def seconds(self, sizes: Iterable[int], *, dtensors: bool) -> Cost:
        """Time for parameters of these sizes in bytes."""
        each = self.per_gradient + (self.per_dtensor if dtensors else 0.0)
        return Cost(sum(self.curve(size) + each for size in sizes), self.provenance)


def measure_update(
    optimizer: Optimizer,
    device: torch.device,
    mesh: DeviceMesh | None,
    shares_cores: bool = False,
) -> UpdateCost:
    """Times steps over parameters of several sizes, and over DTensors.

    All ranks of the mesh call this; it is None for a single one. Where ranks share cores, CPU time
    counts: ranks leave the last collective of a step one by one and update in turn, while those
    that wait do so in the collective (4 ranks on 2 cores: 3.7 ms of CPU time, 4.2 ms in all).
    """
    clock = time.thread_time if shares_cores else time.perf_counter
    samples: dict[int, list[float]] = {}
    for numel in SIZES:
        count = max(1, min(COUNT, TOTAL // numel))
        values = [torch.zeros(numel, device=device) for _ in range(count)]
        samples[4 * numel] = [taken / count for taken in _steps(optimizer, values, clock)]
    small = [torch.zeros(SIZES[0], device=device) for _ in range(COUNT)]
    per_gradient = _gradients(small, clock) / COUNT
    per_dtensor = DTENSOR_S
    if mesh is not None:
        wrapped = [DTensor.from_local(t.clone(), mesh, [Replicate()] * mesh.ndim) for t in small]
        stepped = statistics.median(_steps(optimizer, wrapped, clock)) / COUNT
        more = stepped - statistics.median(samples[4 * SIZES[0]])
        per_dtensor = max(0.0, more + _gradients(wrapped, clock) / COUNT - per_gradient)
    return UpdateCost(Curve.fit(samples), per_gradient, per_dtensor, f"measured {date.today()}")


def _steps(optimizer: Optimizer, values: Sequence[torch.Tensor], clock: Clock) -> list[float]:
    """Seconds of each step, after the first two."""
    parameters = [torch.nn.Parameter(value) for value in values]
    stepped = make_optimizer(optimizer, parameters)
    between = torch.zeros(BETWEEN, device=values[0].device)
    taken = []
    for _ in range(ROUNDS + 2):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        # In training, forward and backward push this data out of the caches. Without that, the step
        # of a GPT was priced at 6.9 ms and took 10.3.
        between += 1
        _synchronize(values[0].device)
        begin = clock()
        stepped.step(lambda: 0.0)
        _synchronize(values[0].device)
        taken.append(clock() - begin)
    return taken[2:]


def _gradients(values: Sequence[torch.Tensor], clock: Clock) -> float:
    """Median seconds of the host for gradients to get from an autograd function to parameters."""
    parameters = [torch.nn.Parameter(value) for value in values]
    taken = []
    for _ in range(ROUNDS + 1):
        _synchronize(parameters[0].device)
        begin = clock()
        _ParameterFunction.apply(*parameters).backward()
        for parameter in parameters:
            parameter.grad = None
        taken.append(clock() - begin)
    return statistics.median(taken[1:])


class _ParameterFunction(torch.autograd.Function):
    """Unwraps parameters and returns a gradient for each, as a compiled step does."""

    @staticmethod
    def forward(ctx: Any, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.parameters = parameters
        local = [_local(parameter).detach() for parameter in parameters]
        return local[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        zeros = [(p, torch.zeros_like(_local(p))) for p in ctx.parameters]
        return tuple(dtensor_like(z, p) if isinstance(p, DTensor) else z for p, z in zeros)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
