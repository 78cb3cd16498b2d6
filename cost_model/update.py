"""What an optimizer's step costs: for each byte, for each parameter, and for each DTensor."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from autopar.cost_model.cost import Cost
from autopar.cost_model.optimizer import make_optimizer

Optimizer = Callable[..., torch.optim.Optimizer]
SMALL, LARGE, COUNT, ROUNDS = 16, 1 << 20, 8, 5
DTENSOR_S = 2e-4  # measured once for AdamW on CPU, torch 2.13: 52 parameters took 11 ms longer


@dataclass(frozen=True)
class UpdateCost:
    """Seconds of one step of an optimizer, linear in what it updates.

    Attributes:
        per_byte: seconds for each byte of parameters.
        per_parameter: seconds for each parameter, however small.
        per_dtensor: seconds more for each parameter that is a DTensor.
        provenance: where these come from.
    """

    per_byte: float
    per_parameter: float
    per_dtensor: float
    provenance: str

    def seconds(self, nbytes: float, parameters: int, *, dtensors: bool) -> Cost:
        """Time to update `parameters` tensors of `nbytes` in all."""
        each = self.per_parameter + (self.per_dtensor if dtensors else 0.0)
        return Cost(nbytes * self.per_byte + parameters * each, self.provenance)


def measure_update(
    optimizer: Optimizer, device: torch.device, mesh: DeviceMesh | None
) -> UpdateCost:
    """Times steps over few large, many small, and many small distributed parameters.

    Args:
        optimizer: class or factory.
        device: where the parameters are.
        mesh: of the ranks that are running, all of which call this; None if there is one.
    """
    large = [torch.zeros(LARGE, device=device)]
    small = [torch.zeros(SMALL, device=device) for _ in range(COUNT)]
    each = _time(optimizer, small) / COUNT
    per_byte = max(0.0, _time(optimizer, large) - each) / (LARGE * large[0].element_size())
    per_dtensor = DTENSOR_S
    if mesh is not None:
        wrapped = [DTensor.from_local(t.clone(), mesh, [Replicate()] * mesh.ndim) for t in small]
        per_dtensor = max(0.0, _time(optimizer, wrapped) / COUNT - each)
    return UpdateCost(per_byte, each, per_dtensor, f"measured {date.today()}")


def _time(optimizer: Optimizer, values: Sequence[torch.Tensor]) -> float:
    """Median seconds of a step, after the first two."""
    parameters = [torch.nn.Parameter(value) for value in values]
    stepped = make_optimizer(optimizer, parameters)
    taken = []
    for _ in range(ROUNDS + 2):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        _synchronize(values[0].device)
        begin = time.perf_counter()
        stepped.step(lambda: 0.0)
        _synchronize(values[0].device)
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[2:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
