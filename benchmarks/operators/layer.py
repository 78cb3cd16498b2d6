"""`Sample`: a sample of torch's own tests of an operator; `Layer`: the operator as a module."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.core.common.tolerances import TOLERANCES, differences, relative_difference
from tests.harness.training import whole

STEPS = 2
"""Calls of a layer; the second shows what a graph has frozen of the first."""

NEAR_ZERO = 1e-3
"""Norm of a value below which absolute differences count, as multiples of it."""

MOST_SAMPLES = 200
"""Samples of an operator among which a seed chooses."""


@functools.cache
def operators() -> Mapping[str, Any]:
    """torch's descriptions of its operators, by name and variant."""
    # torch's tests: seconds to import, and some operators warn
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal import common_methods_invocations as tests
    # torch seeds the generator in each call of an operator that draws; here the loop does
    tests.wrapper_set_seed = lambda function, *args, **kwargs: function(*args, **kwargs)
    return {operator.full_name: operator for operator in tests.op_db}


@dataclass(frozen=True)
class Sample:
    """Arguments of a call of an operator.

    Attributes:
        leaves: flattened (args, kwargs).
        structure: their tree structure.
    """

    operator: str
    number: int
    leaves: tuple[Any, ...]
    structure: Any

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    def inputs(self) -> list[Tensor]:
        """Copies of the tensors; those of floating-point numbers require gradients."""
        return [x.detach().clone().requires_grad_(x.requires_grad) for x in self.tensors]


def samples(name: str, seed: int, count: int) -> list[Sample]:
    """The first sample of an operator, and others drawn by the seed."""
    operator = operators()[name]
    if not operator.dtypes:  # none on the CPU
        return []
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dtype = _dtype(operator.dtypes)
        is_trained = dtype.is_floating_point or dtype.is_complex
        drawn = operator.sample_inputs("cpu", dtype, requires_grad=is_trained)
        found = list(itertools.islice(drawn, MOST_SAMPLES))
    rng = random.Random(f"{seed}/{name}")
    numbers = [0, *sorted(rng.sample(range(1, len(found)), min(count, len(found)) - 1))]
    return [_sample(name, number, found[number]) for number in numbers]


def _dtype(dtypes: Any) -> torch.dtype:
    """The dtype of an operator's samples: float64 where there is a choice."""
    wanted = (torch.float64, torch.float32, torch.complex128, torch.int64)
    return next((dtype for dtype in wanted if dtype in dtypes), min(dtypes, key=str))


def _sample(name: str, number: int, described: Any) -> Sample:
    call = (described.input, *described.args), described.kwargs
    leaves, structure = pytree.tree_flatten(call)
    return Sample(name, number, tuple(leaves), structure)


class Layer(nn.Module):
    """An operator whose floating-point arguments are sums of inputs and parameters.

    A parameter has the shape of a row. It is zero, since most samples are valid only as they are.
    Without such an argument a parameter scales the results.
    """

    def __init__(self, sample: Sample) -> None:
        super().__init__()
        self.function: Callable[..., Any] = operators()[sample.operator].op
        self.arguments = [None if isinstance(x, Tensor) else x for x in sample.leaves]
        self.places = [i for i, x in enumerate(sample.leaves) if isinstance(x, Tensor)]
        self.structure = sample.structure
        self.terms = nn.ParameterDict(
            {
                str(i): nn.Parameter(torch.zeros(x.shape[1:], dtype=x.dtype))
                for i, x in enumerate(sample.tensors)
                if x.requires_grad and x.layout is torch.strided
            }
        )
        self.scale = None if self.terms else nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, *tensors: Tensor) -> Any:
        leaves = list(self.arguments)
        for index, (place, tensor) in enumerate(zip(self.places, tensors, strict=True)):
            name = str(index)
            leaves[place] = tensor + self.terms[name] if name in self.terms else tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        result = self.function(*args, **kwargs)
        return result if self.scale is None else pytree.tree_map(self._scaled, result)

    def _scaled(self, value: Any) -> Any:
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        return value * self.scale.to(value.dtype) if is_float and self.scale is not None else value


def observe(model: nn.Module, sample: Sample, seed: int) -> dict[str, Any]:
    """Outputs, gradients and changed inputs of calls of a layer, by name."""
    torch.manual_seed(seed)
    values: dict[str, Any] = {}
    for step in range(STEPS):
        inputs = sample.inputs()
        outputs = pytree.tree_leaves(model(*inputs))
        values |= {f"output {i} of call {step}": _value(x) for i, x in enumerate(outputs)}
        loss = sum((_score(x, i) for i, x in enumerate(outputs) if _is_trained(x)), torch.zeros(()))
        if loss.requires_grad:
            loss.backward()
        for index, tensor in enumerate(inputs):
            values[f"input {index} after call {step}"] = _value(tensor)
            values[f"gradient of input {index} of call {step}"] = _value(tensor.grad)
    gradients = {name: whole(p.grad) for name, p in model.named_parameters()}
    return values | {f"gradient of {name}": _value(g) for name, g in gradients.items()}


def _is_trained(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _score(output: Tensor, index: int) -> Tensor:
    """A weighted sum of an output; the weights differ, so that no gradients cancel."""
    dense = output if output.layout is torch.strided else output.to_dense()
    parts = torch.view_as_real(dense) if dense.is_complex() else dense
    numbers = torch.arange(parts.numel(), dtype=torch.float64).view(parts.shape)
    # NaN and infinite elements would make all gradients NaN
    kept = torch.where(parts.detach().isfinite(), parts.double(), 0.0)
    return (kept * (0.7 * numbers + index).cos()).sum()


def _value(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    dense = value if value.layout is torch.strided else value.to_dense()
    return dense.detach().resolve_conj().resolve_neg().clone()


def deviation(values: Mapping[str, Any], wanted: Mapping[str, Any]) -> tuple[float, str]:
    """The largest relative difference in multiples of the dtype's tolerance, and its name."""
    if differing := sorted(values.keys() ^ wanted.keys()):
        return float("inf"), differing[0]
    dtypes = {value.dtype for value in wanted.values() if isinstance(value, Tensor)}
    # a gradient in float64 of a result in float32 is as exact as the result
    tolerance = max((_tolerance(dtype) for dtype in dtypes), default=TOLERANCES[torch.float64])
    pairs = ((_deviation(values[name], wanted[name], tolerance), name) for name in wanted)
    return max(pairs, default=(0, ""))


def _tolerance(dtype: torch.dtype) -> float:
    return TOLERANCES.get(dtype.to_real(), TOLERANCES[torch.float64])


def _deviation(value: Any, wanted: Any, tolerance: float) -> float:
    if isinstance(value, Tensor) and isinstance(wanted, Tensor):
        relative = relative_difference(value, wanted)
        if relative > tolerance and value.shape == wanted.shape and value.dtype == wanted.dtype:
            # rounding leaves something of sums that are zero
            relative = min(relative, differences(value, wanted).norm().item() / NEAR_ZERO)
        return relative / tolerance
    return 0.0 if value is wanted or value == wanted else float("inf")


@contextlib.contextmanager
def filled_memory() -> Iterator[None]:
    """Fills memory that torch allocates without values, which shows who returns it."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
