"""`route_steps`: makes the forward of a LightningModule run its steps, and note what they log."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.distributed.tensor import DTensor
from torchmetrics import Metric, MetricCollection

from autopar._torch import pytree
from autopar.errors import StrategyError
from autopar.integrations.lightning.run import Run, WatchedTrainer

if TYPE_CHECKING:
    Base = LightningModule
else:
    Base = object

STEPS = ("training_step", "validation_step", "test_step", "predict_step")
METRIC_METHODS = ("forward", "update", "compute", "reset")

Record = tuple[str | None, str, tuple[Any, ...], dict[str, Any]]
"""A call that follows a step: a metric's name or None for the module, method, arguments."""


@dataclass(frozen=True)
class Step:
    """A step to run in the place of forward.

    Attributes:
        name: name of the method.
        has_index: whether the method takes the index of the batch.
        facts: what Python reads of the trainer; the program is for these values.
    """

    name: str
    has_index: bool
    facts: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class MetricAt:
    """Stand-in for a metric of the module, by name."""

    name: str


@dataclass(frozen=True)
class MetricResult:
    """Stand-in for the result of a metric, which is known after the step alone."""

    index: int


class RoutedModule(Base):
    """A mix-in in front of a LightningModule's class, while it is compiled."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], Step):
            return self._run_step(*args)
        if Run.now() is None and any(isinstance(p, DTensor) for p in self.parameters()):
            raise StrategyError(
                f"{type(self).__name__} was called outside of a step, where its parameters are "
                "sharded: call it inside of `with trainer.strategy.model.gathered():`."
            )
        return super().forward(*args, **kwargs)

    def _run_step(self, step: Step, batch: Any, *rest: Any) -> Any:
        run = Run.now()
        assert run is not None
        records: list[Record] = []
        index = (run.batch_index,) if step.has_index else ()
        with _deferring_metrics(self, records):
            vars(self)["_records"] = records
            try:
                result = getattr(super(), step.name)(batch, *index, *rest)
            finally:
                del vars(self)["_records"]
        return _detached_extras(result), records

    # Calls that need values run after the step.

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        self._after_step("log", name, value, *args, **kwargs)

    def log_dict(self, dictionary: Any, *args: Any, **kwargs: Any) -> None:
        self._after_step("log_dict", dictionary, *args, **kwargs)

    def _after_step(self, method: str, *args: Any, **kwargs: Any) -> None:
        records = vars(self).get("_records")
        if records is None:
            getattr(super(), method)(*args, **kwargs)
        else:
            names = {id(metric): name for name, metric in _metrics(self)}
            records.append((None, method, *_with_stand_ins((args, kwargs), names)))

    @property
    def trainer(self) -> Any:
        run = Run.now()
        return super().trainer if run is None else WatchedTrainer(run)

    @trainer.setter
    def trainer(self, trainer: Any) -> None:
        LightningModule.trainer.fset(self, trainer)  # type: ignore[attr-defined]


def _noted(name: str) -> property:
    """A property of LightningModule that a captured step notes as a fact of its trainer."""
    plain: property = getattr(LightningModule, name)

    def get(self: Any) -> Any:
        run = Run.now()
        return plain.fget(self) if run is None else run.read_fact(name)  # type: ignore[misc]

    return property(get)


for _name in ("current_epoch", "global_step", "global_rank", "local_rank", "logger", "loggers"):
    setattr(RoutedModule, _name, _noted(_name))


def route_steps(module: LightningModule) -> None:
    """Makes forward of a module run its steps; all else stays that of its class."""
    if not isinstance(module, RoutedModule):
        user: Any = type(module)
        module.__class__ = _routed_class(user)
    for metric in module.modules():
        if isinstance(metric, Metric):
            metric.sync_on_compute = metric._to_sync = metric.dist_sync_on_step = False


@functools.cache
def _routed_class(user: Any) -> type[LightningModule]:
    content = {
        "__doc__": user.__doc__,
        "__module__": user.__module__,
        "__qualname__": user.__qualname__,
        "traced_functions": tuple(getattr(user, name) for name in ("forward", *STEPS)),
    }
    return type(user.__name__, (RoutedModule, user), content)


@contextlib.contextmanager
def _deferring_metrics(module: nn.Module, records: list[Record]) -> Iterator[None]:
    """Notes calls of metrics, which depend on values and keep Python state."""
    found = dict(_metrics(module))
    before = {name: dict(vars(metric)) for name, metric in found.items()}
    try:
        for name, metric in found.items():
            for method in METRIC_METHODS:
                vars(metric)[method] = functools.partial(_defer, records, name, method)
        yield
    finally:
        for name, metric in found.items():
            for method in METRIC_METHODS:
                vars(metric).pop(method)
                if method in before[name]:
                    vars(metric)[method] = before[name][method]


def _metrics(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Metrics by name; named_modules would hash them, which reads their states."""
    for name, child in vars(module)["_modules"].items():
        if isinstance(child, (Metric, MetricCollection)):
            yield prefix + name, child
        if child is not None:
            yield from _metrics(child, f"{prefix}{name}.")


def _defer(
    records: list[Record], name: str, method: str, *args: Any, **kwargs: Any
) -> MetricResult:
    records.append((name, method, *_with_stand_ins((args, kwargs), {})))
    return MetricResult(len(records) - 1)


def _with_stand_ins(call: Any, names: dict[int, str]) -> Any:
    """Arguments for a call after the step: metrics by name, tensors without gradients."""

    def stand_in(value: Any) -> Any:
        if isinstance(value, (Metric, MetricCollection)):
            return MetricAt(names[id(value)])
        return value.detach() if isinstance(value, torch.Tensor) else value

    return pytree.tree_map(stand_in, call)


def _detached_extras(result: Any) -> Any:
    """A result of a step, in which the loss alone is trained."""
    if not isinstance(result, dict):
        return result
    loss = {name: value for name, value in result.items() if name == "loss"}
    return pytree.tree_map(_detach, result) | loss


def _detach(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value
