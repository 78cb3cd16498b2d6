"""Local steps on real ranks, held against a simulation of the algorithms on one process."""

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import Outer
from tests.harness.models import MODELS
from tests.harness.reference import batches
from tests.harness.training import ADAMW, close, fixed, shared_captures
from tests.harness.worlds import run

f64 = torch.float64
PLAIN_SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
Values = dict[str, Tensor]


def rows_of(batch: Any, begin: int, end: int) -> Any:
    def cut(leaf: Any) -> Any:
        return leaf[begin:end] if isinstance(leaf, Tensor) and leaf.dim() else leaf

    return torch.utils._pytree.tree_map(cut, batch)


def values(model: nn.Module) -> Values:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def parts_of(model: nn.Module, count: int) -> list[list[str]]:
    """Names of consecutive parameters in parts of equal size."""
    sizes = [(name, p.numel()) for name, p in model.named_parameters()]
    total, before, parts = sum(n for _, n in sizes), 0, [[] for _ in range(count)]
    for name, n in sizes:
        parts[before * count // total].append(name)
        before += n
    return parts


class Simulation:
    """Groups as plain models on one process, and their averages written out."""

    def __init__(self, name: str, groups: int, every: int, outer: Outer, optimizer: Any) -> None:
        self.case, self.every, self.outer = MODELS[name], every, outer
        self.models = [self.case.make().to(f64) for _ in range(groups)]
        self.optimizers = [optimizer(model.parameters()) for model in self.models]
        self.parts = parts_of(self.models[0], outer.blocks)
        self.anchors = [values(model) for model in self.models]
        self.velocity = [{n: torch.zeros_like(v) for n, v in own.items()} for own in self.anchors]
        self.sent: list[Values] = [{} for _ in range(groups)]
        self.arriving: Values = {}
        self.delay = 0 if not outer.late else outer.delay or max(1, every // 6)
        self.seen = [[0] * groups for _ in self.parts]
        self.steps = 0

    def train(self, given: Any) -> None:
        for batch in given:
            self.steps += 1
            rows = next(x for x in torch.utils._pytree.tree_leaves(batch)).shape[0]
            count, begin = len(self.models), 0
            for group, model in enumerate(self.models):
                own = rows // count + (group < rows % count)
                args, kwargs = rows_of(batch, begin, begin + own)
                begin += own
                self.optimizers[group].zero_grad()
                self.case.loss(model(*args, **kwargs)).backward()
                for seen in self.seen:
                    seen[group] += own
            if self.steps <= self.outer.warm_up:
                self.average_gradients()
            for optimizer in self.optimizers:
                optimizer.step()
            self.have_rounds()

    def average_gradients(self) -> None:
        shares = self.shares(self.seen[0], "", draws=False)
        for own in zip(*(model.parameters() for model in self.models), strict=True):
            mean = sum(s * p.grad for s, p in zip(shares, own, strict=True))
            for p in own:
                p.grad.copy_(mean)

    def have_rounds(self) -> None:
        apart = self.steps - self.outer.warm_up
        for number, names in enumerate(self.parts, 1):
            first = self.every * number // len(self.parts)
            if apart <= 0:
                for model, anchors in zip(self.models, self.anchors, strict=True):
                    anchors.update({n: v for n, v in values(model).items() if n in names})
                self.seen[number - 1] = [0] * len(self.models)
                continue
            sent_at = apart - self.delay
            if self.outer.late and sent_at > 0 and (sent_at - first) % self.every == 0:
                for name in names:
                    self.take_up(name)
            if (apart - first) % self.every == 0:
                for name in names:
                    self.average(name, self.shares(self.seen[number - 1], f"{number} {self.steps}"))
                self.seen[number - 1] = [0] * len(self.models)

    def shares(self, seen: Sequence[int], draw: str, *, draws: bool = True) -> list[float]:
        weights = [n if self.outer.weights == "rows" else 1 for n in seen]
        if draws and self.outer.participants:
            among = random.Random(f"{self.outer.seed} {draw}")
            drawn = among.sample(range(len(seen)), self.outer.participants)
            weights = [w if group in drawn else 0 for group, w in enumerate(weights)]
        return [w / sum(weights) for w in weights]

    @torch.no_grad()
    def average(self, name: str, shares: list[float]) -> None:
        own = [dict(model.named_parameters())[name] for model in self.models]
        changes = [p - anchors[name] for p, anchors in zip(own, self.anchors, strict=True)]
        mean = sum(share * change for share, change in zip(shares, changes, strict=True))
        if self.outer.late:
            self.arriving[name] = mean
            for group, p in enumerate(own):
                self.sent[group][name] = p.clone()
            return
        means = self.near(name, own) if self.outer.over == "ring" else [mean] * len(own)
        for group, p in enumerate(own):
            p.copy_(self.stepped(group, name, means[group]))

    def near(self, name: str, own: Sequence[Tensor]) -> list[Tensor]:
        """The way from each group's anchor to the mean of its neighbours and itself."""
        count, means = len(own), []
        for group, anchors in enumerate(self.anchors):
            near = {group, (group - 1) % count, (group + 1) % count}
            means.append(sum(own[each] for each in near) / len(near) - anchors[name])
        return means

    def stepped(self, group: int, name: str, mean: Tensor) -> Tensor:
        """The anchor of a group after a step of its outer optimizer."""
        velocity = self.velocity[group][name].mul_(self.outer.momentum).add_(mean)
        step = self.outer.lr * (mean + self.outer.momentum * velocity)
        self.anchors[group][name] = self.anchors[group][name] + step
        return self.anchors[group][name]

    @torch.no_grad()
    def take_up(self, name: str) -> None:
        """The result of the round that was sent, and each group's own steps since."""
        for group, model in enumerate(self.models):
            p = dict(model.named_parameters())[name]
            own = p - self.sent[group][name]
            p.copy_(self.stepped(group, name, self.arriving[name]) + own)


def make(
    every: int, outer: Any, optimizer: Any, name: str = "gpt", zero: Any = 0, **more: Any
) -> Any:
    strategy = fixed(zero, sync_every=every, outer=outer, **{"dp_shard": 1, **more})
    model = autopar.compile(MODELS["gpt"].make().to(f64), strategy=strategy, fallback=False)
    return model, optimizer(model.parameters())


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, given: Any, name: str = "gpt"
) -> None:
    for args, kwargs in given:
        optimizer.zero_grad()
        MODELS["gpt"].loss(model(*args, **kwargs)).backward()
        optimizer.step()


def states(rank: int, world_size: int, settings: Any, steps: int, rows: int) -> list[Values]:
    """The state of this rank's group after training under each setting."""
    found = []
    for every, outer, more in settings:
        with shared_captures("gpt", f64):
            model, optimizer = make(every, outer, ADAMW, **more)
            train(model, optimizer, batches(MODELS["gpt"], range(steps), rows, f64))
            found.append(model.full_state_dict())
    return found


def simulated(groups: int, every: int, outer: Any, steps: int, rows: int) -> list[Values]:
    sim = Simulation("gpt", groups, every, Outer.of(outer), ADAMW)
    sim.train(batches(MODELS["gpt"], range(steps), rows, f64))
    return [dict(model.state_dict()) for model in sim.models]


def check(ranks: int, settings: Any, steps: int = 5, rows: int = 13) -> None:
    answers = run(states, ranks, settings=settings, steps=steps, rows=rows)
    for place, (every, outer, more) in enumerate(settings):
        size = more.get("dp_shard", 1) * more.get("tp", 1)
        want = simulated(ranks // size, every, outer, steps, rows)
        for rank, answer in enumerate(answers):
            close(answer[place], want[rank // size], 1e-9)


def test_groups_of_one_rank_follow_the_algorithms() -> None:
    check(
        2,
        [
            (2, "local_sgd", {}),
            (2, "diloco", {}),
            (2, Outer(lr=0.7, momentum=0.9, blocks=2), {}),
            (2, Outer(weights="rows", warm_up=2), {}),
            (2, Outer(lr=0.7, momentum=0.9, late=True), {}),
            (2, Outer(lr=0.7, momentum=0.9, late=True, delay=2, blocks=2), {}),
            (3, Outer(lr=0.7, momentum=0.9, late=True, delay=2, warm_up=1), {}),
        ],
    )


@pytest.mark.slow
def test_groups_of_several_ranks_shard_within() -> None:
    check(
        4,
        [
            (2, "diloco", {"zero": 3, "dp_shard": 2}),
            (2, "diloco", {"tp": 2}),
            (1, "ring", {}),
            (2, Outer(over="ring", lr=0.7, momentum=0.6, warm_up=1), {}),
            (2, Outer(weights="rows", participants=3), {}),
        ],
    )


def synchronous(rank: int, world_size: int) -> None:
    """Averages after every step of SGD are those of gradients, also with momentum."""
    given = list(batches(MODELS["gpt"], range(4), 12, f64))
    with shared_captures("gpt", f64):
        model, optimizer = make(1, "local_sgd", PLAIN_SGD)
        train(model, optimizer, given)
        other = autopar.compile(MODELS["gpt"].make().to(f64), strategy=fixed(0))
        train(other, PLAIN_SGD(other.parameters()), given)
    close(model.full_state_dict(), other.full_state_dict(), 1e-9)


def test_a_round_at_every_step_is_data_parallelism() -> None:
    run(synchronous, 2)


def compressed(rank: int, world_size: int) -> list[Values]:
    """The state after one round of plain changes, and of compressed ones."""
    found = []
    for compress in (None, "bf16", "int8"):
        with shared_captures("gpt", f64):
            model, optimizer = make(2, Outer(compress=compress), PLAIN_SGD)
            train(model, optimizer, batches(MODELS["gpt"], range(2), 12, f64))
        found.append(model.full_state_dict())
    return found


def test_compressed_changes_leave_groups_equal() -> None:
    start = MODELS["gpt"].make().to(f64).state_dict()
    first, *others = run(compressed, 3)
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            close(mine, theirs, 0)
    for exact, bound in zip(first[1:], (2**-7, 2**-6), strict=True):
        change = sum((first[0][n] - start[n]).abs().sum() for n in start)
        lost = sum((first[0][n] - exact[n]).abs().sum() for n in start)
        assert 0 < lost < bound * change


def pipelined(rank: int, world_size: int) -> Values:
    with shared_captures("gpt", f64):
        model, optimizer = make(2, "diloco", ADAMW, pp=2, micro_batches=2)
        train(model, optimizer, batches(MODELS["gpt"], range(4), 12, f64))
    return model.full_state_dict()


@pytest.mark.slow
def test_groups_of_stages() -> None:
    want = simulated(2, 2, "diloco", 4, 12)[0]
    for got in run(pipelined, 4):
        close(got, want, 1e-9)


class Untraceable(nn.Module):
    """A model that runs as it is, since its Python reads values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * (2.0 if x.sum().item() > 0 else 1.0)).square().mean()


def started_late(rank: int, world_size: int) -> list[Tensor]:
    """Models on the meta device, and such that cannot be captured, begin and end alike."""
    torch.manual_seed(rank)
    strategy = fixed(0, sync_every=2, dp_shard=1)
    with torch.device("meta"):
        plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    deferred = autopar.compile(
        plain, strategy=strategy, device="cpu", loss_fn=nn.functional.mse_loss
    )
    fallen = autopar.compile(Untraceable(), strategy=strategy, batch="local")
    x, y = torch.randn(4, 4), torch.randn(4, 1)
    for model, given in ((deferred, (x, y)), (fallen, (x,))):
        optimizer = None
        for _ in range(2):
            loss = model(*given)
            optimizer = optimizer or PLAIN_SGD(model.parameters())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach().clone() for m in (deferred, fallen) for p in m.parameters()]


def test_groups_begin_alike_however_the_model_starts() -> None:
    first, second = run(started_late, 2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(p.abs().sum() > 0 for p in first)
