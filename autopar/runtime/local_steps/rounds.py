"""`Rounds`: counts the optimizer steps of a group, and has the rounds that are due."""

from __future__ import annotations

import functools
import random
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from autopar.core.plan.outer import LocalSteps, Outer
from autopar.errors import StrategyError
from autopar.runtime.local_steps.average import start_average
from autopar.runtime.local_steps.block import Block
from autopar.runtime.local_steps.groups import Groups
from autopar.runtime.parameters.distribute import is_remote, local_part
from autopar.runtime.process_groups import explaining_comm_errors

COUNTS = "counts"


class Rounds:
    """Rounds of a model's groups, after optimizer steps. Groups begin with group 0's values.

    A step is over when optimizers have stepped every parameter with a gradient.

    Attributes:
        steps: optimizer steps so far.
        called: whether the model was called for training since the last step.
    """

    def __init__(self, model: nn.Module, local: LocalSteps, groups: Groups) -> None:
        _register()
        _OBSERVERS.add(self)
        self.local, self.groups = local, groups
        named = dict(model.named_parameters())
        self._names = {id(p): name for name, p in named.items() if not is_remote(p)}
        buffers = {n: b for n, b in model.named_buffers() if b.is_floating_point()}
        trained = {n: p for n, p in named.items() if p.requires_grad and not is_remote(p)}
        with torch.no_grad(), explaining_comm_errors("the start of groups"):
            for tensor in [*named.values(), *model.buffers()]:
                if not is_remote(tensor):
                    dist.broadcast(local_part(tensor).detach(), group=groups.peers, group_src=0)
        parts = _parts(trained, local.outer.blocks)
        parts[-1] |= buffers
        self.blocks = [Block(part, local.outer, groups.peers) for part in parts if part]
        self.parameters = {id(p): p for p in trained.values()}
        self.steps, self.called, self._stepped = 0, False, set[int]()

    def saw(self, rows: int) -> None:
        """Notes a training call with so many rows of this group."""
        self.called = True
        for block in self.blocks:
            block.rows += rows

    @property
    def is_warm(self) -> bool:
        """Whether groups step apart; before, they average gradients at every step."""
        return self.steps >= self.local.outer.warm_up

    def before_step(self, optimizer: Optimizer) -> None:
        """Averages gradients over the groups while they warm up."""
        own = [self.parameters[id(p)] for p in _trained_by(optimizer) if id(p) in self.parameters]
        if self.is_warm or not self.called or not own:
            return
        gradients = [local_part(p.grad) for p in own if p.grad is not None]
        weights = self.local.outer.weights
        shares = self._shares(Outer(weights=weights), self.blocks[0].rows, "")
        means = start_average(gradients, Outer(), shares, self.groups.peers).wait()
        for gradient, mean in zip(gradients, means, strict=True):
            gradient.copy_(mean)

    def after_step(self, optimizer: Optimizer) -> None:
        """Counts a step, and has the rounds that are due.

        Raises:
            StrategyError: a parameter has a gradient, but no round or no optimizer.
        """
        own = {id(p) for p in _trained_by(optimizer)} & self._names.keys()
        if not self.called or not own:
            return
        self._check(own)
        self._stepped |= own
        with_gradient = {key for key, p in self.parameters.items() if p.grad is not None}
        if with_gradient <= self._stepped:
            self._stepped.clear()
            self.called = False
            self.steps += 1
            self._have_rounds()

    def _check(self, own: set[int]) -> None:
        if late := own - self.parameters.keys():
            raise StrategyError(
                f"{self._names[min(late)]} was frozen when groups began to step apart, and has no "
                "rounds: unfreeze it before autopar.compile"
            )
        if own & self._stepped:
            key = next(k for k, p in self.parameters.items() if k not in self._stepped)
            raise StrategyError(
                f"no optimizer steps {self._names[key]}, but it has a gradient: freeze it by "
                "requires_grad_(False) before autopar.compile, or give it to an optimizer"
            )

    def _have_rounds(self) -> None:
        outer, delay = self.local.outer, self.local.delay
        apart = self.steps - outer.warm_up
        for number, block in enumerate(self.blocks, 1):
            if apart < 0:
                block.rows = 0.0
            elif apart == 0 and outer.warm_up:
                # Anchors are from before the warm-up. The outer optimizer must not take all of its
                # change for that of one round.
                block.average(self._shares(Outer(), block.rows, ""), plain=True)
            else:
                if delay and self._ends_round(number, apart - delay):
                    block.take_up()
                if self._ends_round(number, apart):
                    block.average(self._shares(outer, block.rows, f"{number} {self.steps}"))

    def _ends_round(self, number: int, apart: int) -> bool:
        """Whether a block's round ends so many steps after the warm-up; blocks are spread."""
        every = self.local.sync_every
        return apart > 0 and (apart - every * number // len(self.blocks)) % every == 0

    def _shares(self, outer: Outer, rows: float, draw: str) -> list[float]:
        """Share of each group in an average."""
        count = self.groups.count
        weights = [1.0] * count
        if outer.weights == "rows":
            table = torch.zeros(count, dtype=torch.float64, device=self._device)
            table[self.groups.index] = rows
            dist.all_reduce(table, group=self.groups.peers)
            weights = table.tolist()
        return drawn_shares(outer, weights, draw)

    @property
    def _device(self) -> torch.device:
        return next(iter(self.parameters.values())).device

    def state_dict(self) -> dict[str, Tensor]:
        """Counts, and the state of each block."""
        counts = [self.steps, *(block.rows for block in self.blocks)]
        found = {COUNTS: torch.tensor(counts, dtype=torch.float64)}
        for block in self.blocks:
            found |= block.state()
        return found

    def load(self, state: Mapping[str, Tensor]) -> bool:
        """Takes over a `state_dict`; starts anew and returns False if it lacks something."""
        counts = state.get(COUNTS)
        needed = {key for block in self.blocks for key in block.state()}
        if counts is None or len(counts) != 1 + len(self.blocks) or not needed <= state.keys():
            for block in self.blocks:
                block.restart()
            return False
        self.steps, rows = int(counts[0]), counts[1:].tolist()
        for block, seen in zip(self.blocks, rows, strict=True):
            block.load(state)
            block.rows = seen
        return True


def drawn_shares(outer: Outer, weights: Sequence[float], draw: str) -> list[float]:
    """Share of each group in an average by its weight, 0 for groups that `draw` leaves out."""
    if outer.participants:
        # a text seeds all ranks alike, so they draw the same groups without a message
        among = random.Random(f"{outer.seed} {draw}")
        drawn = among.sample(range(len(weights)), outer.participants)
        weights = [weight * (group in drawn) for group, weight in enumerate(weights)]
    return [weight / sum(weights) for weight in weights]


_OBSERVERS: weakref.WeakSet[Rounds] = weakref.WeakSet()


@functools.cache
def _register() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    for rounds in _OBSERVERS:
        rounds.before_step(optimizer)


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    for rounds in list(_OBSERVERS):  # rounds step outer optimizers
        rounds.after_step(optimizer)


def _trained_by(optimizer: Optimizer) -> Iterable[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _parts(tensors: Mapping[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    """Consecutive tensors in `count` parts of about as many elements."""
    total, before = sum(t.numel() for t in tensors.values()), 0
    parts: list[dict[str, Tensor]] = [{} for _ in range(count)]
    for name, tensor in tensors.items():
        parts[min(count * before // max(total, 1), count - 1)][name] = tensor
        before += tensor.numel()
    return parts
