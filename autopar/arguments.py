"""Arguments of `compile`, `plan` and `verify`: checks before any work, and conversions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn

from autopar.capture.call import call_of, flattened
from autopar.capture.stated_rows import StatedRows
from autopar.common.checks import MAX_RANKS, choice, count, demand, flag, nbytes, seconds, texts
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.topology.devices import find_device
from autopar.errors import StrategyError
from autopar.ir.graph import ParameterInfo
from autopar.plan.strategy import REDUCE_PRECISIONS, Strategy
from autopar.report.plan import Plan

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}
MOST_TRIALS = 1000


def check(*required: str, **given: Any) -> None:
    """Checks arguments by name; optional ones may be None, unless `required` here.

    Raises:
        StrategyError: an argument is invalid; the message says what to give.
        TypeError: there is no argument of that name.
    """
    for name, value in given.items():
        if name not in _CHECKS:
            raise TypeError(f"there is no argument {name!r}; there are {', '.join(_CHECKS)}")
        if value is not None or name in required or name not in _OPTIONAL:
            _CHECKS[name](name, value)
    if given.get("example_inputs") is not None and given.get("loss_fn") is None:
        _check_fit(given["model"], given["example_inputs"])


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


def memory_of(memory: int | str | None) -> int | None:
    """The memory cap in bytes."""
    return None if memory is None else nbytes("memory", memory)


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


def strategy_of(
    strategy: str | Strategy,
    batch: str,
    lossy: bool | Sequence[str],
    reduce_precision: Any,
) -> Strategy:
    """The fixed choices; ranks with their own rows share a model only on request."""
    fixed = Strategy.of(strategy).allowing(lossy)
    if reduce_precision is not None:
        fixed = replace(fixed, reduce_precision=reduce_precision)
    return replace(fixed, search=()) if batch == "local" else fixed


def _model(name: str, value: Any) -> None:
    wanted = "give an nn.Module" + (", not its class" if isinstance(value, type) else "")
    demand(isinstance(value, nn.Module), name, value, wanted)


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


def _device(name: str, value: Any) -> None:
    try:
        known = torch.device(value).type != "meta"
    except (RuntimeError, TypeError):
        known = False
    demand(known, name, value, 'give a device that trains, such as "cuda" or "cpu"')


_CHECKS: Mapping[str, Callable[[str, Any], object]] = {
    "model": _model,
    "world_size": count,
    "example_inputs": _inputs,
    "loss_fn": _loss,
    "loss": _callable,
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
    "double": flag,
    "verify": flag,
    "steps": count,
    "timeout_s": seconds,
    "time_limit_s": lambda name, value: seconds(name, value, zero=True),
    "trials": lambda name, value: count(name, value, 0, MOST_TRIALS),
    "rank": lambda name, value: count(name, value, 0, MAX_RANKS - 1),
    "progress": _callable,
    "device": _device,
    "init_fn": _callable,
    "max_programs": count,
    "static": lambda name, value: texts(name, value, "give a list of names"),
}

_OPTIONAL = frozenset(
    {
        "rows",
        "world_size",
        "example_inputs",
        "loss_fn",
        "loss",
        "memory",
        "cluster",
        "plan",
        "precision",
        "reduce_precision",
        "time_limit_s",
        "trials",
        "device",
        "init_fn",
    }
)
