"""Outputs beside a loss stay in parts along tp, cp and ep, until a loop reads them."""

import copy
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.passes.rules.lowerings.ring_attention import RING
from autopar.runtime.border.lazy_rows import LazyRows
from tests.harness.training import fixed
from tests.harness.worlds import Raised, run

f64 = torch.float64
VOCABULARY = 24


class Decoder(nn.Module):
    """Causal attention, whose outputs are drawn: logits, hidden values, chosen tokens, a loss."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.width = draw.choice([8, 16])
        self.heads = draw.choice([2, 4])
        self.outputs = draw.sample(["logits", "hidden", "tokens", "score", "tuple"], 3)
        self.has_bias, self.is_flat = draw.random() < 0.5, draw.random() < 0.5
        torch.manual_seed(seed)
        self.token = nn.Embedding(VOCABULARY, self.width)
        self.qkv = nn.Linear(self.width, 3 * self.width)
        self.out = nn.Linear(self.width, self.width)
        self.up, self.down = nn.Linear(self.width, 32), nn.Linear(32, self.width)
        self.head = nn.Linear(self.width, VOCABULARY, bias=self.has_bias)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Any]:
        x = self.token(ids)
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(x)))
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        every: dict[str, Any] = {
            "logits": logits.flatten(0, 1) if self.is_flat else logits,
            "hidden": x.transpose(1, 2),
            "tokens": logits.argmax(-1),
            "score": (logits.argmax(-1) == labels).sum(),
            "tuple": (q, logits[..., : VOCABULARY // 2]),
        }
        return {"loss": loss} | {name: every[name] for name in self.outputs}


def batch(step: int, rows: int, positions: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(step)
    ids = torch.randint(VOCABULARY, (rows, positions + 1), generator=made)
    labels = ids[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=made) < 0.2] = -100
    return ids[:, :-1].contiguous(), labels


def leaves(out: dict[str, Any]) -> list[Tensor]:
    return torch.utils._pytree.tree_leaves({k: v for k, v in out.items() if k != "loss"})


def trains_alike(
    rank: int,
    world_size: int,
    *,
    seeds: list[int],
    lengths: Sequence[int] = (8, 16),
    **options: Any,
) -> int:
    """Trains drawn models; some steps read outputs, some train by one. Counts outputs in parts."""
    in_parts = 0
    for seed in seeds:
        plain = Decoder(seed).to(f64)
        strategy = fixed(**options)
        parallel = autopar.compile(copy.deepcopy(plain), strategy=strategy, fallback=False)
        draw = random.Random(seed)
        ways = [draw.choice(["leave", "read", "differentiate"]) for _ in range(3)]
        sgd = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (plain, parallel)]
        for step, way in enumerate(["leave", "read", *ways]):
            ids, labels = batch(step, 4, draw.choice(lengths))
            want, have = plain(ids, labels), parallel(ids, labels)
            for a, b in zip(leaves(have), leaves(want), strict=True):
                assert a.shape == b.shape
                in_parts += isinstance(a, LazyRows)
                if way == "read":
                    torch.testing.assert_close(a + 0, b + 0, rtol=1e-9, atol=1e-11)
                    torch.testing.assert_close(a.reshape(-1)[1:] * 1, b.reshape(-1)[1:] * 1)
            losses = []
            for out in want, have:
                loss = out["loss"]
                if way == "differentiate":
                    extra = [x for x in leaves(out) if x.is_floating_point()]
                    loss = loss + sum(x.square().mean() for x in extra)
                loss.backward()
                losses.append(loss.detach())
            torch.testing.assert_close(losses[1], losses[0], rtol=1e-9, atol=1e-11)
            for optimizer in sgd:
                optimizer.step()
                optimizer.zero_grad()
        if options.get("ring_attention"):
            assert parallel.plan.partitions[0].lowers(RING)
        state = parallel.full_state_dict()
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-11)
    return in_parts


def reads_on_one_rank(rank: int, world_size: int) -> None:
    model = autopar.compile(Decoder(0).to(f64), strategy=fixed(tp=2), fallback=False)
    out = model(*batch(0, 2, 8))
    shapes = [x.shape for x in leaves(out)]  # needs no other rank
    assert shapes
    out["loss"].backward()
    if rank == 0:
        leaves(out)[0].sum()
    model(*batch(0, 2, 8))


def test_a_rank_that_reads_alone_is_told() -> None:
    answers = run(reads_on_one_rank, 2, expect_errors=True)
    for answer in answers:
        assert isinstance(answer, Raised)
        assert answer.type == "DisagreementError"
        assert "rank(s) [0]: reads output" in answer.message


class Remembers(Decoder):
    """Keeps its logits in an attribute, as a loop that logs them does."""

    last: Tensor | None = None

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Any]:
        out = super().forward(ids, labels)
        self.last = next(x for x in leaves(out) if x.is_floating_point())
        return out


def assigns_outputs(rank: int, world_size: int) -> None:
    plain = Remembers(1).to(f64)
    parallel = autopar.compile(copy.deepcopy(plain), strategy=fixed(cp=2), fallback=False)
    for model in plain, parallel:
        model(*batch(0, 2, 8))["loss"].backward()
    assert not isinstance(parallel.last, LazyRows)
    torch.testing.assert_close(parallel.last, plain.last, rtol=1e-9, atol=1e-11)


def test_what_the_model_keeps_is_whole() -> None:
    run(assigns_outputs, 2)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {"tp": 2}),
        (2, {"cp": 2}),
        (2, {"cp": 2, "ring_attention": True, "zero": 3}),
        (3, {"cp": 3, "recompute": "full"}),
        (3, {"cp": 3, "ring_attention": True, "lengths": (11, 17)}),
        (4, {"cp": 2, "zero": 3}),
        (4, {"tp": 2, "cp": 2}),
    ],
)
def test_drawn_models_train_as_on_one_device(ranks: int, options: dict[str, Any]) -> None:
    in_parts = run(trains_alike, ranks, seeds=[*range(2)], **options)
    assert all(in_parts)
