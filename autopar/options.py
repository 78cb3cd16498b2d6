"""`CompileOptions`: the arguments of `compile`, `plan` and `verify`, checked before any work."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Literal

import torch
from torch import nn

from autopar.capture.call import call_of, flattened
from autopar.capture.stated_rows import StatedRows
from autopar.core.common.checks import (
    choice,
    count,
    demand,
    flag,
    nbytes,
    seconds,
    suggests_fields,
    texts,
)
from autopar.core.ir.graph import ParameterInfo
from autopar.core.plan.plan import Plan
from autopar.core.plan.strategy import REDUCE_PRECISIONS, Strategy
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.topology.devices import find_device
from autopar.errors import StrategyError
from autopar.runtime.options import MAX_PROGRAMS, Batch, Outputs

ReducePrecision = Literal["bf16"]
MakeOptimizer = Callable[..., torch.optim.Optimizer]

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}
MOST_TRIALS = 1000


@suggests_fields
@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """All arguments of `compile` but the model; its docstring explains each.

    Raises:
        StrategyError: an argument is invalid; the message says what to give.
    """

    world_size: int | None = None
    example_inputs: Any = None
    loss_fn: Callable[..., Any] | None = None
    optimizer: MakeOptimizer = torch.optim.AdamW
    strategy: str | Strategy = "auto"
    memory: int | str | None = None
    cluster: Cluster | None = None
    plan: Plan | None = None
    batch: Batch = "global"
    outputs: Outputs = "whole"
    rows: int | Mapping[str | int, int] | StatedRows | None = None
    precision: str | torch.dtype | None = None
    reduce_precision: ReducePrecision | None = None
    lossy: bool | Sequence[str] = False
    backend: str = "eager"
    cuda_graphs: bool = False
    fallback: bool = True
    timeout_s: float = 300.0
    time_limit_s: float | None = 60.0
    trials: int | None = None
    verify: bool = False
    device: str | torch.device | None = None
    init_fn: Callable[[nn.Module], Any] | None = None
    max_programs: int = MAX_PROGRAMS
    static: Sequence[str] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None or field.default is not None:
                _CHECKS[field.name](field.name, value)

    def in_plain_torch(self) -> CompileOptions:
        """The options under AUTOPAR_PLAIN=1, which trains the plain model under torch's DDP."""
        return replace(
            self,
            world_size=None,
            strategy="ddp",
            plan=None,
            example_inputs=None,
            lossy=False,
            backend="eager",
            cuda_graphs=False,
            fallback=True,
            verify=False,
        )

    @property
    def fixed(self) -> Strategy:
        """The choices that are not the planner's.

        Ranks with their own rows share a model only on request.
        """
        strategy = Strategy.of(self.strategy).allowing(self.lossy)
        if self.reduce_precision is not None:
            strategy = replace(strategy, reduce_precision=self.reduce_precision)
        return replace(strategy, search=()) if self.batch == "local" else strategy

    @property
    def memory_bytes(self) -> int | None:
        """The memory cap of a rank in bytes."""
        return None if self.memory is None else nbytes("memory", self.memory)

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype of autocast, None for none: the plan's where `precision` is not given."""
        if self.precision is None and self.plan is not None and self.plan.precision is not None:
            return getattr(torch, self.plan.precision)
        return precision_of(self.precision)


def check_model(model: Any) -> None:
    """Raises StrategyError if this is no module, such as its class."""
    wanted = "give an nn.Module" + (", not its class" if isinstance(model, type) else "")
    demand(isinstance(model, nn.Module), "model", model, wanted)


def check_inputs(model: nn.Module, options: CompileOptions, *, required: bool = False) -> None:
    """Raises StrategyError if example inputs do not fit forward, or are missing but required."""
    inputs = options.example_inputs
    if required and inputs is None:
        _inputs("example_inputs", inputs)
    if inputs is not None and options.loss_fn is None:
        _check_fit(model, inputs)


def _check_fit(model: nn.Module, example_inputs: Any) -> None:
    arguments, named = call_of(example_inputs)
    try:
        signature = inspect.signature(model.forward)
    except ValueError:  # of a function in C
        return
    try:
        signature.bind(*arguments, **named)
    except TypeError as error:
        raise StrategyError(
            f"example_inputs do not fit {type(model).__name__}.forward{signature}: {error}. Give "
            "its arguments: a tuple in their order, or a dict by name."
        ) from None


def precision_of(precision: str | torch.dtype | None) -> torch.dtype | None:
    """The dtype of autocast, None for none."""
    if precision is None:
        return None
    if isinstance(precision, torch.dtype) and precision in PRECISIONS.values():
        return precision
    return PRECISIONS[choice("precision", precision, PRECISIONS, " or the dtype of one")]


def priced_precision(
    precision: str | torch.dtype | None,
    cluster: Cluster | None,
    parameters: Iterable[ParameterInfo],
) -> tuple[torch.dtype | None, tuple[str, ...]]:
    """The dtype of autocast that an offline plan assumes, and a note on it.

    Without a choice it is bf16 for float32 parameters on devices with tensor cores for it.
    """
    given, figures = precision_of(precision), None
    if cluster is not None:
        figures = cluster.figures or find_device(cluster.device)
    rates = {} if figures is None else figures.flops_per_s
    narrow, wide = rates.get("bfloat16", 0.0), rates.get("float32", 0.0)
    is_float32 = all(p.dtype == torch.float32 for p in parameters)
    if given is not None or narrow <= wide or not is_float32 or figures is None:
        return given, ()
    if precision is None:
        note = "bf16 autocast with fp32 parameters is assumed; precision='fp32' prices float32"
        return torch.bfloat16, (note,)
    idle = f"{narrow / 1e12:,.0f} against {wide / 1e12:,.0f} TFLOP/s"
    return None, (
        f"float32 leaves the tensor cores of {figures.name} idle ({idle}): give precision='bf16'",
    )


def dtype_name(dtype: torch.dtype | None) -> str | None:
    """The name of a dtype without "torch."."""
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _inputs(name: str, value: Any) -> None:
    named = not isinstance(value, Mapping) or all(isinstance(key, str) for key in value)
    ok = named and any(isinstance(leaf, torch.Tensor) for leaf in flattened(value)[0])
    wanted = "give the arguments of a call, tensors among them: a tuple, or a dict by name"
    demand(ok, name, value, wanted)


def _loss(name: str, value: Any) -> None:
    is_class = isinstance(value, type) and issubclass(value, nn.Module)
    wanted = "give a function, or an instance such as nn.CrossEntropyLoss()"
    demand(callable(value) and not is_class, name, value, wanted)


def _optimizer(name: str, value: Any) -> None:
    foreign = isinstance(value, type) and not issubclass(value, torch.optim.Optimizer)
    wanted = "give the class or factory, such as torch.optim.AdamW"
    demand(callable(value) and not foreign, name, value, wanted)


def _lossy(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        Strategy().allowing(texts(name, value, "give True, False, or a list of methods"))


@cache
def _backends() -> tuple[str, ...]:
    """Backends of torch.compile except autopar's own."""
    return tuple(sorted({*torch.compiler.list_backends(exclude_tags=())} - {"autopar"}))


def _backend(name: str, value: Any) -> None:
    if value != "eager":
        choice(name, value, _backends())


def _cluster(name: str, value: Any) -> None:
    wanted = "give a Cluster, such as autopar.Cluster.load(NAME_OR_FILE)"
    demand(isinstance(value, Cluster), name, value, wanted)


def _plan(name: str, value: Any) -> None:
    wanted = "give a Plan, such as autopar.Plan.load(FILE)"
    demand(isinstance(value, Plan), name, value, wanted)


def _callable(name: str, value: Any) -> None:
    demand(callable(value), name, value, "give a function")


def _rows(name: str, value: Any) -> None:
    dims = value.items() if isinstance(value, Mapping) else [(0, value)]
    ok = isinstance(value, StatedRows) or all(
        isinstance(key, (str, int)) and type(dim) is int and dim >= 0 for key, dim in dims
    )
    demand(ok, name, value, 'give a dim, or dims by name or position: {"x": 1, "y": 0}')


def _limit_s(name: str, value: Any) -> None:
    if value is not None:
        seconds(name, value, zero=True)


def _device(name: str, value: Any) -> None:
    try:
        known = torch.device(value).type != "meta"
    except (RuntimeError, TypeError):
        known = False
    demand(known, name, value, 'give a device that trains, such as "cuda" or "cpu"')


_CHECKS: Mapping[str, Callable[[str, Any], object]] = {
    "world_size": count,
    "example_inputs": _inputs,
    "loss_fn": _loss,
    "optimizer": _optimizer,
    "strategy": lambda name, value: Strategy.of(value),
    "memory": nbytes,
    "cluster": _cluster,
    "plan": _plan,
    "batch": lambda name, value: choice(name, value, ("global", "local")),
    "rows": _rows,
    "outputs": lambda name, value: choice(name, value, ("whole", "own")),
    "precision": lambda name, value: precision_of(value),
    "reduce_precision": lambda name, value: choice(name, value, REDUCE_PRECISIONS),
    "lossy": _lossy,
    "backend": _backend,
    "fallback": flag,
    "cuda_graphs": flag,
    "verify": flag,
    "timeout_s": seconds,
    "time_limit_s": _limit_s,
    "trials": lambda name, value: count(name, value, 0, MOST_TRIALS),
    "device": _device,
    "init_fn": _callable,
    "max_programs": count,
    "static": lambda name, value: texts(name, value, "give a list of names"),
}
