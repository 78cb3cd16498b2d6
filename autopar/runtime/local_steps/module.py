"""`LocalStepsModule`: a compiled model whose groups of ranks step apart."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from autopar._torch import pytree
from autopar.capture.call import BatchShard, batch_shard_of
from autopar.core.common.containers import flatten
from autopar.core.common.notices import warn_once
from autopar.core.common.world import as_world
from autopar.core.plan.outer import LocalSteps, PlannedSteps
from autopar.core.plan.plan import Plan
from autopar.errors import LossyWarning, StrategyError
from autopar.runtime.agreement.consensus import broadcast_from_rank0, run_on_all_ranks
from autopar.runtime.execution import MakePlan
from autopar.runtime.local_steps.groups import Groups
from autopar.runtime.local_steps.rounds import Rounds
from autopar.runtime.module import DistributedModule
from autopar.runtime.options import Options
from autopar.runtime.parameters.compression_state import STATE_DICT_KEY

ROUNDS_KEY = "local_steps"


def _in_group(method: Callable[..., Any]) -> Any:
    """The same method, with this rank's group as the world."""

    @functools.wraps(method)
    def call(self: LocalStepsModule, *args: Any, **kwargs: Any) -> Any:
        with self._local.groups.as_world():
            return method(self, *args, **kwargs)

    return call


@dataclass
class LocalRun:
    """Groups of ranks, and the rounds of their local steps.

    Attributes:
        steps: None for a copy, such as an average of weights, which takes part in no round.
        rounds: None until parameters have values under a plan.
        pending_state: state of rounds that have not started.
    """

    groups: Groups
    steps: LocalSteps | None = None
    rounds: Rounds | None = None
    pending_state: Mapping[str, torch.Tensor] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalRun:
        return LocalRun(self.groups)


class LocalStepsModule(DistributedModule):
    """A model that every group of ranks trains under the plan, and groups average in rounds.

    Results, states and clipped norms are those of this rank's group.
    """

    _local: LocalRun

    plan_for = _in_group(DistributedModule.plan_for)
    apply_plan = _in_group(DistributedModule.apply_plan)
    full_state_dict = _in_group(DistributedModule.full_state_dict)
    load_full_state_dict = _in_group(DistributedModule.load_full_state_dict)
    full_optimizer_state_dict = _in_group(DistributedModule.full_optimizer_state_dict)
    load_full_optimizer_state_dict = _in_group(DistributedModule.load_full_optimizer_state_dict)
    clip_grad_norm_ = _in_group(DistributedModule.clip_grad_norm_)
    check_replicas = _in_group(DistributedModule.check_replicas)
    __deepcopy__ = _in_group(DistributedModule.__deepcopy__)

    @classmethod
    def of(
        cls, local: LocalSteps, groups: Groups, model: nn.Module, *rest: Any
    ) -> LocalStepsModule:
        """A module whose groups take local steps; `rest` are arguments of `PlannedModule`."""
        rest = tuple(
            replace(x, groups=groups.count, group=groups.index) if isinstance(x, Options) else x
            for x in rest
        )
        made = cls(model, *rest)
        made.__dict__["_local"] = LocalRun(groups, local)
        execution = made._execution
        execution.make_plan = partial(plan_of_first_group, local, groups, execution.make_plan)
        warn_once(
            LossyWarning,
            f"training differs from one device: {groups.count} groups of {groups.size} rank(s) "
            f"step apart, and average every {local.sync_every} steps ({local.outer})",
        )
        return made

    def materialize_parameters(self) -> None:
        """Gives parameters their values, and starts the rounds; all ranks call this at once."""
        with self._local.groups.as_world():
            super().materialize_parameters()
        self.start_rounds()

    def start_rounds(self) -> None:
        """Starts the rounds if parameters have values under a plan; all ranks call this at once."""
        if self._local.steps is None or self._local.rounds is not None:
            return
        if not self.is_planned or self._execution.deferred is not None:
            return
        self._local.rounds = Rounds(self._wrapped[0], self._local.steps, self._local.groups)
        if self._local.pending_state:
            self._load_rounds(self._local.rounds, self._local.pending_state)
        self._local.pending_state = None

    @property
    def rank_groups(self) -> Groups:
        """The groups of ranks."""
        return self._local.groups

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks that the rows of a batch are split over, of all groups."""
        return super().data_parallel_size * self._local.groups.count

    @property
    def data_parallel_rank(self) -> int:
        """Index among these ranks; ranks that share a model have the same one."""
        with self._local.groups.as_world():
            own = super().data_parallel_rank
        return own + self._local.groups.index * super().data_parallel_size

    @property
    def ranks_of_rows(self) -> list[int]:
        """The first rank with each slice of the rows of a batch."""
        groups = self._local.groups
        own = super().ranks_of_rows
        return [group * groups.size + rank for group in range(groups.count) for rank in own]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model on this rank's rows; scalar results are means over the group's rows.

        Without gradients and under batch="global", each group runs the whole batch.
        """
        training = torch.is_grad_enabled() and not self._options.on_trial
        with self._local.groups.as_world():
            if training:
                leaves, structure = flatten((args, kwargs))
                rows = self._shard_of_group(leaves, structure).rows
                args, kwargs = pytree.tree_unflatten(*self.group_arguments(leaves, structure))
            result = super().forward(*args, **kwargs)
        if training and self._local.rounds is not None:
            self._local.rounds.saw(rows)
        return result

    @contextlib.contextmanager
    def gathered(self, *args: Any, **kwargs: Any) -> Iterator[nn.Module]:
        """The whole model of this rank's group; see `DistributedModule.gathered`."""
        with self._local.groups.as_world(), super().gathered(*args, **kwargs) as model:
            yield model

    def whole_optimizer(self, make: Any) -> Any:
        """Raises StrategyError: rounds follow optimizers of this rank's parameters."""
        raise StrategyError("whole_optimizer has no local steps: leave sync_every out")

    def state_dict(self, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        """The model of this rank's group, with the state of its rounds."""
        with self._local.groups.as_world():
            found = super().state_dict(**options)
        self.start_rounds()
        if self._local.rounds is not None and not self._execution.is_gathered:
            key = (options.get("prefix") or "") + STATE_DICT_KEY
            found[key] = {**found.get(key, {}), ROUNDS_KEY: self._local.rounds.state_dict()}
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Loads a state into this rank's group; rounds start anew without their state."""
        rounds = (state_dict.get(STATE_DICT_KEY) or {}).get(ROUNDS_KEY, {})
        with self._local.groups.as_world():
            result = super().load_state_dict(state_dict, *args, **kwargs)
        if self._local.rounds is None:
            self._local.pending_state = rounds
        else:
            self._load_rounds(self._local.rounds, rounds)
        return result

    @staticmethod
    def _load_rounds(rounds: Rounds, state: Mapping[str, torch.Tensor]) -> None:
        if not rounds.load(state) and rounds.steps:
            warn_once(
                LossyWarning, "the outer optimizer starts anew: the state dict lacks its state"
            )

    def group_arguments(self, leaves: list[Any], structure: Any) -> tuple[list[Any], Any]:
        """The flattened arguments of a call with this group's rows of the batch."""
        shard = self._shard_of_group(leaves, structure)
        tensors = iter(shard.tensors)
        return [next(tensors) if isinstance(x, torch.Tensor) else x for x in leaves], structure

    def _shard_of_group(self, leaves: list[Any], structure: Any) -> BatchShard:
        options, groups = self._options, self._local.groups
        return batch_shard_of(
            leaves,
            structure,
            mode=options.batch,
            rank=groups.index,
            ranks=groups.count,
            static=options.static,
            stated=options.rows,
            strict=True,
        )


def plan_of_first_group(local: LocalSteps, groups: Groups, make: MakePlan, *arguments: Any) -> Plan:
    """The plan that group 0 makes of a call, on all ranks: measured times differ."""

    def make_own() -> Plan:
        with groups.as_world():
            return make(*arguments)

    with as_world(None):
        own = run_on_all_ranks(make_own)
        plan = broadcast_from_rank0(lambda: own)
    return replace(plan, local_steps=PlannedSteps(local, groups.count))
