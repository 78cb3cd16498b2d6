"""`record_script`: runs a training script for a few steps, and writes what its optimizers did.

`autopar verify train.py` needs the loop as the user wrote it: its losses, penalties, clipping and
accumulation are not in forward. Hooks of torch on all optimizers see their outcome.
"""

from __future__ import annotations

import contextlib
import gc
import json
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from autopar._torch import patched
from autopar.core.common.constant_draws import ConstantDraws
from autopar.core.common.world import rank
from autopar.runtime.border.closures import after_gradients
from autopar.runtime.module import DistributedModule
from autopar.runtime.parameters.distribute import is_remote
from autopar.train.verification.verify import full_value, known_differences, least_precise

SUMMARY = "summary.json"


@dataclass(frozen=True)
class Summary:
    """One rank's run of a script.

    Attributes:
        steps: number of optimizer steps, of all optimizers.
        ranks: number of running ranks.
        batches: `batch` of each compiled model.
        draws: random operators that were replaced by constants.
        dtype: least precise dtype of parameters and casts.
        notes: limits of the plan that ran.
    """

    steps: int
    ranks: int
    batches: tuple[str, ...]
    draws: tuple[str, ...]
    dtype: str
    notes: tuple[str, ...]

    @classmethod
    def load(cls, folder: Path) -> Summary:
        """The summary that a rank wrote into its folder."""
        return cls(**json.loads((folder / SUMMARY).read_text()))


def step_file(folder: Path, step: int) -> Path:
    """The file with the tensors of an optimizer's step; steps count from 1."""
    return folder / f"step{step}.pt"


class _Enough(BaseException):
    """Ends a script after its last step; no handler of `Exception` stops it."""


def record_script(path: str, arguments: Sequence[str], steps: int, folder: Path) -> Summary:
    """Runs a script as `__main__` until an optimizer has made `steps` steps, or the script ends.

    All ranks call this at once. Each writes its tensors of every step into `folder`.
    """
    folder.mkdir()
    recorder = _Recorder(folder, steps)
    before = sys.argv, sys.path[:]
    sys.argv, sys.path[0] = [path, *arguments], str(Path(path).resolve().parent)
    try:
        with recorder.watching(), contextlib.suppress(_Enough):
            runpy.run_path(path, run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before
    summary = recorder.summary()
    (folder / SUMMARY).write_text(json.dumps(asdict(summary)))
    return summary


class _LoopDraws(ConstantDraws):
    """Constant draws inside modules and backward; those of samplers and inits stay random."""

    def __init__(self) -> None:
        super().__init__()
        self.depth = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if not self.depth:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def enter_module(self, *_: Any) -> None:
        self.depth += 1

    def leave_module(self, *_: Any) -> None:
        self.depth -= 1

    def inside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with constant draws while it runs."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                self.depth -= 1

        return call

    @contextlib.contextmanager
    def everywhere(self) -> Iterator[None]:
        """Constants in every module's call and every backward inside the context."""
        modules = torch.nn.modules.module
        entered = modules.register_module_forward_pre_hook(self.enter_module)
        # A forward that raises must lower the depth too, or all later draws would be constants.
        left = modules.register_module_forward_hook(self.leave_module, always_call=True)
        engine = torch.autograd
        try:
            with (
                patched(engine, "backward", self.inside(engine.backward)),
                patched(engine, "grad", self.inside(engine.grad)),
                self,
            ):
                yield
        finally:
            entered.remove()
            left.remove()


class _Recorder:
    """Writes gradients before, and parameters and buffers after each step of an optimizer."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps = folder, steps
        self.draws = _LoopDraws()
        self.count = 0
        self.steps_of: dict[Optimizer, int] = {}
        self.models: list[DistributedModule] = []
        self.gradients: dict[str, Tensor] = {}
        self.dtypes: set[torch.dtype] = set()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Records the steps of all optimizers inside the context."""
        hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        try:
            with self.draws.everywhere():
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def summary(self) -> Summary:
        least = least_precise(self.dtypes, self.draws.narrowest)
        notes = dict.fromkeys(note for model in self.models for note in known_differences(model))
        return Summary(
            self.count,
            max((model._options.ranks for model in self.models), default=1),
            tuple(model._options.batch for model in self.models),
            tuple(self.draws.names),
            str(least).removeprefix("torch."),
            tuple(map(str, notes)),
        )

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if _steps_within_autopar():
            return None
        before = self.steps_of.setdefault(optimizer, 0)
        if before == self.steps:
            raise _Enough
        self.steps_of[optimizer] = before + 1
        return after_gradients(args, kwargs, partial(self._read_gradients, optimizer))

    def _read_gradients(self, optimizer: Optimizer) -> None:
        held = self._parameters(optimizer)
        self.gradients = _whole({n: p.grad for n, p in held.items() if p.grad is not None})

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if _steps_within_autopar():
            return
        self.count += 1
        parameters = self._parameters(optimizer)
        self.dtypes |= {p.dtype for p in parameters.values()}
        content = {
            "gradient": self.gradients,
            "parameter": _whole(parameters),
            "buffer": _whole(self._buffers()),
        }
        if any(map(_is_first_of_stage, self.models)) or rank() == 0:
            torch.save(content, step_file(self.folder, self.count))
        self.gradients = {}

    def _parameters(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """The optimizer's parameters that this rank holds, by name."""
        names = self._names()
        order = [*self.steps_of].index(optimizer) + 1
        held = {}
        for index, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            if not is_remote(p):
                name = self._name(p, names)
                held[name or f"parameter {index} of optimizer {order}"] = p
        return held

    def _names(self) -> dict[int, tuple[DistributedModule, str]]:
        """The compiled model and name of each parameter, wherever the script keeps the model."""
        # by type: a compiled model claims the class of the user's
        models = [m for m in gc.get_objects() if issubclass(type(m), DistributedModule)]
        return {id(p): (m, name) for m in models for name, p in _parameters_of(m)}

    def _name(self, parameter: Tensor, names: Mapping[int, tuple[Any, str]]) -> str | None:
        if id(parameter) not in names:
            return None
        model, name = names[id(parameter)]
        if not any(model is each for each in self.models):
            self.models.append(model)
        index = next(i for i, each in enumerate(self.models) if each is model)
        return _title(name, index)

    def _buffers(self) -> dict[str, Tensor]:
        return {
            _title(name, index): value
            for index, model in enumerate(self.models)
            for name, value in model.named_buffers()
            if not is_remote(value)
        }


def _steps_within_autopar() -> bool:
    """Whether autopar itself called the optimizer's step, to measure one."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__", "").startswith((__name__, "torch.")) and frame.f_back:
        frame = frame.f_back
    name = frame.f_globals.get("__name__", "")
    return name.startswith("autopar.") and not name.startswith("autopar.integrations")


def _title(name: str, index: int) -> str:
    """The name of a tensor, with the number of its model unless that is the first."""
    return name if index == 0 else f"{name} of model {index + 1}"


def _parameters_of(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [*model.named_parameters(remove_duplicate=False)] if "_wrapped" in vars(model) else []


def _whole(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Whole values of tensors, on the host; ranks that share one call this at once."""
    return {name: _dense(value.detach()) for name, value in tensors.items() if value is not None}


def _dense(value: Tensor) -> Tensor:
    value = full_value(value)
    return (value if value.layout is torch.strided else value.to_dense()).cpu().clone()


def _is_first_of_stage(model: DistributedModule) -> bool:
    """Whether this rank is the first of those with its stage of the model."""
    if model.mesh is None:
        return rank() == 0
    axes, place = model.mesh.mesh_dim_names or (), model.mesh.get_coordinate() or ()
    return not any(index for axis, index in zip(axes, place, strict=True) if axis != "pp")
