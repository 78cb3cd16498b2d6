"""`Block`: tensors that have their rounds together, and the outer optimizer of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch import distributed as dist

from autopar.core.plan.outer import Outer
from autopar.runtime.local_steps.average import InFlight, start_average
from autopar.runtime.parameters.distribute import distribute_like, local_part
from autopar.runtime.parameters.sharded import in_layout_of

SGD_STATE = "momentum_buffer"


class Block:
    """Parameters and buffers of this rank that groups average together.

    Each tensor is its anchor, the value after the last round, plus what is in flight (`sent`),
    plus the steps since.

    Attributes:
        tensors: the model's tensors by name.
        rows: rows that this group has seen since the last round.
    """

    def __init__(self, tensors: Mapping[str, Tensor], outer: Outer, peers: dist.ProcessGroup):
        self.tensors, self.outer, self.peers, self.rows = dict(tensors), outer, peers, 0.0
        self.anchors = {
            name: nn.Parameter(local_part(t).detach().to(_wide(t.dtype), copy=True))
            for name, t in tensors.items()
        }
        trained = [a for name, a in self.anchors.items() if tensors[name].requires_grad]
        buffers = [a for name, a in self.anchors.items() if not tensors[name].requires_grad]
        options = {"momentum": outer.momentum, "nesterov": outer.momentum > 0}
        groups = [{"params": trained, "lr": outer.lr, **options}, {"params": buffers, "lr": 1.0}]
        self.optimizer = torch.optim.SGD([group for group in groups if group["params"]])
        self.momentum: dict[str, Tensor] = {}
        if outer.momentum:
            by_name = {n: a for n, a in self.anchors.items() if tensors[n].requires_grad}
            # torch makes momentum in its first step, but a state dict from before must have it, too
            self.momentum = {name: torch.zeros_like(a.data) for name, a in by_name.items()}
            for name, anchor in by_name.items():
                self.optimizer.state[anchor][SGD_STATE] = self.momentum[name]
        self.sent = self._zeros() if outer.late else {}
        self._landed = self._zeros() if outer.late else {}
        self._flight: InFlight | None = None

    @torch.no_grad()
    def average(self, shares: Sequence[float], *, plain: bool = False) -> None:
        """Has a round: averages the changes of all groups, or sends them for `take_up`.

        `plain` takes the average itself, without the outer optimizer.
        """
        changes = self._changes()
        if self.outer.late and not plain:
            self.sent, self._flight = changes, self._start(changes, shares)
        else:
            mean = dict(zip(changes, self._start(changes, shares).wait(), strict=True))
            if self.outer.over == "ring":
                mean = {name: value - self.anchors[name] for name, value in mean.items()}
            self._step(mean, plain=plain)
            self._set({})
        self.rows = 0.0

    @torch.no_grad()
    def take_up(self) -> None:
        """Puts the late average in the place of what this group sent; its steps since stay.

        The outer momentum sees each change once, and groups part for a round and the delay only.
        (Shen et al. 2019, CoCoD-SGD; Douillard et al. 2025, Streaming DiLoCo's overlap)
        """
        since = self._changes()
        self._step(self.landed)
        self._set(since)
        for value in (*self.sent.values(), *self._landed.values()):
            value.zero_()

    @property
    def landed(self) -> dict[str, Tensor]:
        """The average that was sent in the last round; waits for it."""
        if self._flight is not None:
            self._landed = dict(zip(self.sent, self._flight.wait(), strict=True))
            self._flight = None
        return self._landed

    @torch.no_grad()
    def restart(self) -> None:
        """Takes the tensors as they are for the result of a round."""
        for name, anchor in self.anchors.items():
            anchor.copy_(local_part(self.tensors[name]))
        for value in (*self.momentum.values(), *self.sent.values(), *self.landed.values()):
            value.zero_()

    def state(self) -> dict[str, Tensor]:
        """State that the next rounds need, by kind and name, laid out as the tensors are."""
        found = {}
        for key, name, value in self._kept():
            found[f"{key}.{name}"] = in_layout_of(self.tensors[name], value)
        return found

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Takes over what `state` returned."""
        for key, name, value in self._kept():
            given = distribute_like(self.tensors[name], state[f"{key}.{name}"])
            value.copy_(local_part(given))

    def _kept(self) -> Iterator[tuple[str, str, Tensor]]:
        tables: dict[str, Mapping[str, Tensor]] = {
            "anchor": {name: anchor.detach() for name, anchor in self.anchors.items()},
            "momentum": self.momentum,
            "sent": self.sent,
            "landed": self.landed,
        }
        for key, table in tables.items():
            yield from ((key, name, value) for name, value in table.items())

    def _changes(self) -> dict[str, Tensor]:
        """Changes of this group since the last round."""
        found = {}
        for name, anchor in self.anchors.items():
            found[name] = local_part(self.tensors[name]).to(anchor.dtype) - anchor
            if name in self.sent:
                found[name] -= self.sent[name]
        return found

    def _start(self, changes: Mapping[str, Tensor], shares: Sequence[float]) -> InFlight:
        values = list(changes.values())
        if self.outer.over == "ring":  # neighbours have other anchors
            values = [change + self.anchors[name] for name, change in changes.items()]
        return start_average(values, self.outer, shares, self.peers)

    def _step(self, mean: Mapping[str, Tensor], *, plain: bool = False) -> None:
        for name, anchor in self.anchors.items():
            if plain:
                anchor.add_(mean[name])
            else:
                anchor.grad = -mean[name]
        if not plain:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def _set(self, changes: Mapping[str, Tensor]) -> None:
        """Sets the tensors to their anchors, plus changes."""
        for name, anchor in self.anchors.items():
            value = anchor + changes[name] if changes else anchor
            local_part(self.tensors[name]).copy_(value)

    def _zeros(self) -> dict[str, Tensor]:
        return {name: torch.zeros_like(anchor.data) for name, anchor in self.anchors.items()}


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
