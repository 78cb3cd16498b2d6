"""`python -m benchmarks.slow_links.simulate`: losses of local steps, all groups in one process.

Runs the outer optimizer of autopar on replicas of the example GPT. Losses are those of real ranks
to rounding, and nothing is sent, so that many settings can be compared.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from autopar import Outer
from autopar.core.plan.outer import LocalSteps
from autopar.runtime.local_steps.block import Block
from autopar.runtime.local_steps.rounds import drawn_shares
from benchmarks.report import about, save
from benchmarks.slow_links.contenders import LOCAL
from benchmarks.slow_links.learning_rate import learning_rate
from examples.train_gpt import GPT, batch, read_stdlib, validation_loss


@dataclass(frozen=True)
class Setting:
    """A training run.

    Attributes:
        every: optimizer steps between rounds.
        warm_up: steps over which the learning rate rises, before a cosine; None is constant.
        averages_adam: whether rounds average the moments of Adam too.
    """

    steps: int = 240
    every: int = 12
    rows: int = 24
    seq: int = 128
    lr: float = 1e-3
    groups: int = 3
    width: int = 192
    layers: int = 4
    warm_up: int | None = None
    averages_adam: bool = False

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step, from 1."""
        return learning_rate(step, self.steps, self.lr, self.warm_up)

    def model(self) -> GPT:
        torch.manual_seed(0)
        return GPT(self.seq, self.width, layers=self.layers)


class Replicas:
    """Groups that step apart, each with its model and optimizer; one group is plain training."""

    def __init__(self, setting: Setting, outer: Outer | None) -> None:
        count = setting.groups if outer else 1
        self.setting, self.outer, self.steps = setting, outer, 0
        self.models = [setting.model() for _ in range(count)]
        self.adams = [AdamW(model.parameters(), lr=setting.lr) for model in self.models]
        self.blocks = []
        if outer is not None:
            named = [dict(model.named_parameters()) for model in self.models]
            self.blocks = [Block(each, outer, None) for each in named]  # type: ignore[arg-type]

    def step(self, x: Tensor, y: Tensor) -> float:
        """Train one step; return the loss."""
        self.steps += 1
        count, loss = len(self.models), 0.0
        parts = zip(self.models, x.chunk(count), y.chunk(count), strict=True)
        for model, own_x, own_y in parts:
            own = model(own_x, own_y)
            own.backward()
            loss += own.item() / count
        if self.outer is not None and self.steps <= self.outer.warm_up:
            self._average([[p.grad for p in m.parameters()] for m in self.models])
        for adam in self.adams:
            for group in adam.param_groups:
                group["lr"] = self.setting.lr_at(self.steps)
            adam.step()
            adam.zero_grad()
        self._have_round()
        return loss

    def _have_round(self) -> None:
        if self.outer is None:
            return
        apart, every = self.steps - self.outer.warm_up, self.setting.every
        delay = LocalSteps(every, self.outer).delay
        with torch.no_grad():
            if delay and apart > delay and (apart - delay) % every == 0:
                self.take_up()
            if apart < 0 or apart % every:
                return
            outer = self.outer if apart else Outer()
            shares = drawn_shares(outer, [1.0] * len(self.models), f"1 {self.steps}")
            exchange(self.blocks, shares, plain=not apart)
        if self.setting.averages_adam:
            moments = [
                [v for state in adam.state.values() for v in state.values() if v.dim()]
                for adam in self.adams
            ]
            self._average(moments)

    def take_up(self) -> None:
        """Put a late average in its place, in all groups."""
        for block in self.blocks:
            block.take_up()

    def _average(self, tables: Sequence[Sequence[Any]]) -> None:
        """Replace tensors of all groups by their mean."""
        for same in zip(*tables, strict=True):
            mean = torch.stack(list(same)).mean(0)
            for tensor in same:
                tensor.copy_(mean)

    def mean_model(self) -> nn.Module:
        """Return the mean of all groups' models."""
        made = self.setting.model().to(next(self.models[0].parameters()).dtype)
        for mean, *same in zip(
            made.parameters(), *(m.parameters() for m in self.models), strict=True
        ):
            mean.data.copy_(torch.stack([p.data for p in same]).mean(0))
        return made


def exchange(blocks: Sequence[Block], shares: Sequence[float], *, plain: bool) -> None:
    """Have a round of all groups, as `Block.average` has it on ranks."""
    changes = [block._changes() for block in blocks]
    ring = blocks[0].outer.over == "ring"
    means = _of_neighbours(blocks) if ring else [_weighted(changes, shares)] * len(blocks)
    for block, own, mean in zip(blocks, changes, means, strict=True):
        if block.outer.late and not plain:
            block.sent = own
            block._landed = {name: value.clone() for name, value in mean.items()}
        else:
            block._step(mean, plain=plain)
            block._set({})


def _weighted(changes: Sequence[Mapping[str, Tensor]], shares: Sequence[float]) -> dict[str, Any]:
    names = changes[0]
    return {n: sum(s * c[n] for s, c in zip(shares, changes, strict=True)) for n in names}


def _of_neighbours(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    """Return the way from each group's anchor to the mean of its neighbours and itself."""
    found, count = [], len(blocks)
    for group, block in enumerate(blocks):
        near = {group, (group - 1) % count, (group + 1) % count}
        own = block.anchors.items()
        mean = {n: sum(blocks[each].tensors[n] for each in near) / len(near) - a for n, a in own}
        found.append(mean)
    return found


def train(setting: Setting, outer: Outer | None, text: Tensor, held_out: Tensor) -> dict[str, Any]:
    """Train, and return losses on held-out text of one group and of the mean of all."""
    replicas = Replicas(setting, outer)
    losses = [
        replicas.step(*batch(text, setting.rows, setting.seq, step))
        for step in range(1, setting.steps + 1)
    ]
    own = validation_loss(replicas.models[0].eval(), held_out, 32, setting.seq)
    mean = validation_loss(replicas.mean_model().eval(), held_out, 32, setting.seq)
    return {"validation_loss": own, "of_mean": mean, "last_losses": losses[-20:]}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.slow_links.simulate", description=__doc__
    )
    add = parser.add_argument
    add("contenders", nargs="*", default=["ddp", *LOCAL])
    add("--set", default="{}", help="fields of the setting, as JSON")
    add("--json", type=Path, help="file of the figures, to which these are added")
    given = parser.parse_args()
    torch.set_num_threads(1)
    fields: Mapping[str, Any] = json.loads(given.set)
    setting, (text, held_out) = Setting(**fields), read_stdlib()
    results = json.loads(given.json.read_text())["results"] if _exists(given.json) else []
    for name in given.contenders:
        outer = None if name == "ddp" else LOCAL.get(name) or Outer(**json.loads(name))
        found = {"contender": name, **fields, **train(setting, outer, text, held_out)}
        results.append(found)
        shown = {key: value for key, value in found.items() if key != "last_losses"}
        print(json.dumps(shown), flush=True)
        if given.json:
            save(given.json, {**about(), "results": results})


def _exists(path: Path | None) -> bool:
    return path is not None and path.exists()


if __name__ == "__main__":
    main()
