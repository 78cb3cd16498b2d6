"""`TrainingState`: tensors for torch.distributed.checkpoint, and plain values beside them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.optim import Optimizer

from autopar.core.common.notices import warn_once
from autopar.core.common.world import rank
from autopar.errors import AutoparError, CheckpointError, LossyWarning, NumericsWarning
from autopar.runtime.agreement.consensus import is_multi_rank
from autopar.runtime.local_steps.module import LocalStepsModule
from autopar.runtime.module import DistributedModule
from autopar.runtime.parameters.compression_state import STATE_DICT_KEY
from autopar.train.checkpoints.named_state import OPTIONS, NamedState, States
from autopar.train.checkpoints.plain_data import PlainPlanner, PlainReader, check_plain
from autopar.train.checkpoints.position import DataPosition
from autopar.train.checkpoints.random_state import RandomState


@dataclass(frozen=True)
class TrainingState:
    """Everything that a run needs to go on.

    Attributes:
        model: a module under a plan, or a plain one on one process.
        extra: other objects with `state_dict` and `load_state_dict`, by name.
        data: place in the data.
    """

    model: nn.Module
    optimizers: Sequence[Optimizer]
    scheduler: Any = None
    scaler: Any = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    data: DataPosition = field(default_factory=DataPosition)

    @cached_property
    def _named(self) -> NamedState:
        return NamedState(self.model, self.optimizers)

    def tensors(self) -> dict[str, Any]:
        """State of the model, the optimizers and the extra objects, without copies.

        Groups that step apart have one each, under names of their own after the first.
        """
        own, group = self._with_extra(self._named.now()), group_of(self.model)
        return {f"group-{group}": own} if group else own

    def _own_tensors(self) -> dict[str, Any]:
        return self._with_extra(get_state_dict(self.model, self.optimizers, options=OPTIONS))

    def _with_extra(self, states: States) -> dict[str, Any]:
        weights, moments = states
        extra = {name: each.state_dict() for name, each in self.extra.items()}
        for name, state in extra.items():
            check_plain(f"extra[{name!r}]", state)
        check_plain("the optimizer", moments)
        return {"model": weights, "optimizer": moments, "extra": extra}

    def values(self, step: int) -> dict[str, Any]:
        """The step and the schedules, the same on every rank.

        Raises:
            StrategyError: a schedule holds other objects than plain data.
        """
        values = {
            "step": step,
            "mesh": _mesh(self.model),
            "scheduler": self.scheduler and self.scheduler.state_dict(),
            "scaler": self.scaler and self.scaler.state_dict(),
        }
        for name in ("scheduler", "scaler"):
            check_plain(f"the {name}", values[name])
        return values

    def own_values(self) -> dict[str, Any]:
        """The random state of this rank, and its place in the data."""
        data = self.data.state_dict()
        check_plain("the loader", data)
        return {
            "random": RandomState.now().state_dict(),
            "data": data,
            "stream": _stream(self.model),
        }

    def restore(self, folder: Any, values: Mapping[str, Any], *, trusted: bool = False) -> None:
        """Takes over the state of a checkpoint; `values` has the own values of all ranks.

        Files that are `trusted` may hold any objects.
        """
        with _explaining_values(folder):
            is_same_mesh = values["mesh"] == _mesh(self.model)
        group = group_of(self.model) if is_same_mesh else 0  # other groups begin as the first
        tensors = self._own_tensors()
        if not is_same_mesh and tensors["model"].pop(STATE_DICT_KEY, None) is not None:
            warn_once(
                LossyWarning,
                f"{folder} was saved on another mesh: what compression has left out until then is "
                "not loaded and starts anew, and so does the state of local steps",
            )
        try:
            named = {f"group-{group}": tensors} if group else tensors
            reader = FileSystemReader(folder) if trusted else PlainReader(folder)
            planner = None if trusted else PlainPlanner()
            load(named, storage_reader=reader, planner=planner, no_dist=not is_multi_rank())
        # torch derives CheckpointException from BaseException: `except Exception` would miss it.
        except (CheckpointException, Exception) as error:
            reason = getattr(error, "failures", {}) or {0: (error,)}
            first = next(iter(reason.values()))[0]
            raise CheckpointError(
                f"{folder} does not fit this model and optimizer ({first}): give the ones that it "
                "was saved with, or another folder"
            ) from error
        set_state_dict(
            self.model,
            self.optimizers,
            model_state_dict=tensors["model"],
            optim_state_dict=tensors["optimizer"],
            # Strict loading refuses a state that lacks compression's entries, taken out above.
            options=StateDictOptions(flatten_optimizer_state_dict=True, strict=is_same_mesh),
        )
        for name, each in self.extra.items():
            each.load_state_dict(tensors["extra"][name])
        with _explaining_values(folder):
            for name in ("scheduler", "scaler"):
                mine = getattr(self, name)
                if mine is not None and values[name] is not None:
                    mine.load_state_dict(values[name])
            self._load_own(values["ranks"], is_same_mesh)

    def _load_own(self, ranks: Sequence[Mapping[str, Any]], is_same_mesh: bool) -> None:
        """Takes over this rank's place in the data and its random numbers."""
        own = ranks[rank() % len(ranks)]
        self.data.load_state_dict(own["data"])
        RandomState.of(own["random"]).restore()
        drew = any(each["stream"] is not None for each in ranks)
        if is_same_mesh and drew:
            assert isinstance(self.model, DistributedModule)
            self.model.rng_state = own["stream"]
        elif drew:
            warn_once(
                NumericsWarning,
                "autopar differs from the run before the restart: on another mesh dropout draws "
                "other masks, and what the loop draws by torch's generator may differ too",
            )


@contextlib.contextmanager
def _explaining_values(folder: Any) -> Iterator[None]:
    """Raises CheckpointError where values are not those that `values` gives."""
    try:
        yield
    except AutoparError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{folder} holds other values than autopar saves ({type(error).__name__}: {error}): "
            "delete it, so that the one before is resumed"
        ) from error


def _mesh(model: nn.Module) -> dict[str, int] | None:
    """Sizes of the mesh, and the number of groups that step apart."""
    plan = model.plan if isinstance(model, DistributedModule) else None
    groups = {"groups": model.rank_groups.count} if isinstance(model, LocalStepsModule) else {}
    return {**dict(plan.mesh), **groups} if plan is not None else None


def group_of(model: nn.Module) -> int:
    """This rank's group of those that step apart, 0 without."""
    return model.rank_groups.index if isinstance(model, LocalStepsModule) else 0


def _stream(model: nn.Module) -> Any:
    """State of the model's own random stream, None if it has drawn nothing."""
    return model._context.rng.state if isinstance(model, DistributedModule) else None
