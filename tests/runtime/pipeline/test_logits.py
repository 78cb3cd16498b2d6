"""Logits beside a loss in pipelines: on their stage until read, or left out by chunks."""

import copy
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.core.ir.graph import tensors
from autopar.runtime.border.lazy_rows import LazyRows
from autopar.runtime.codegen.absent_rows import AbsentRows
from tests.harness.training import fixed
from tests.harness.worlds import run

f64 = torch.float64
VOCABULARY, WIDTH, POSITIONS = 40, 8, 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class LanguageModel(nn.Module):
    """Returns its loss and logits, as models of transformers do."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.reduction, self.shifts = draw.choice(["mean", "sum"]), draw.random() < 0.5
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=draw.random() < 0.5)
        if draw.random() < 0.5:
            self.head.weight = self.token.weight

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.blocks(self.token(ids)))
        own, of = (logits[:, :-1], labels[:, 1:]) if self.shifts else (logits, labels)
        flat = own.reshape(-1, VOCABULARY), of.reshape(-1)
        return {"loss": F.cross_entropy(*flat, reduction=self.reduction), "logits": logits}


def batch(step: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(step)
    ids = torch.randint(VOCABULARY, (8, POSITIONS), generator=made)
    labels = torch.randint(VOCABULARY, (8, POSITIONS), generator=made)
    return ids, labels.where(torch.rand(labels.shape, generator=made) > 0.3, -100)


def trains_alike(rank: int, world_size: int, *, seeds: list[int], **options: Any) -> None:
    for seed in seeds:
        plain = LanguageModel(seed).to(f64)
        strategy = fixed(loss_chunks=3, micro_batches=2, **options)
        parallel = autopar.compile(copy.deepcopy(plain), strategy=strategy, fallback=False)
        sgd = [torch.optim.SGD(m.parameters(), 0.002, momentum=0.9) for m in (plain, parallel)]
        for step in range(3):
            losses = []
            for model, optimizer in zip((plain, parallel), sgd, strict=True):
                out = model(*batch(step))
                out["loss"].backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(out["loss"].detach())
            torch.testing.assert_close(losses[1], losses[0], rtol=1e-9, atol=1e-11)
            assert isinstance(out["logits"], AbsentRows)
        assert largest_rows(parallel) < 4 * POSITIONS
        with torch.no_grad():
            want, have = plain(*batch(9)), parallel(*batch(9))
        torch.testing.assert_close(have["logits"] + 0, want["logits"], rtol=1e-9, atol=1e-11)
        state = parallel.full_state_dict()
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-11)


def reads_some_steps(rank: int, world_size: int, *, options: dict[str, Any]) -> None:
    """Without chunks, logits stay on their stage until a step reads them, or trains by them."""
    plain = LanguageModel(3).to(f64)
    parallel = autopar.compile(copy.deepcopy(plain), strategy=fixed(**options), fallback=False)
    sgd = [torch.optim.SGD(m.parameters(), 0.002, momentum=0.9) for m in (plain, parallel)]
    for step, way in enumerate(["leave", "read", "leave", "differentiate", "read"]):
        losses = []
        for model, optimizer in zip((plain, parallel), sgd, strict=True):
            out = model(*batch(step))
            loss = out["loss"]
            if way == "differentiate":
                loss = loss + out["logits"].square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append((loss.detach(), out["logits"]))
        (want, logits), (have, own) = losses
        torch.testing.assert_close(have, want, rtol=1e-9, atol=1e-11)
        assert own.shape == logits.shape
        assert step > 2 or isinstance(own, LazyRows)
        if way == "read":
            torch.testing.assert_close(own + 0, logits + 0, rtol=1e-9, atol=1e-11)
    state = parallel.full_state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {"pp": 2, "schedule": "1f1b", "micro_batches": 3}),
        (4, {"pp": 2, "schedule": "gpipe", "micro_batches": 2, "zero": 1}),
    ],
)
def test_logits_stay_on_their_stage(ranks: int, options: dict[str, Any]) -> None:
    run(reads_some_steps, ranks, options=options)


def largest_rows(model: Any) -> int:
    """The most rows of logits in a program of this rank's stages in training; 0 without any."""
    graphs = [
        graph.graph
        for call in model._execution.executor.compiled_calls.values()
        if call.differentiates
        for stage in call.stages.values()
        for program in stage.programs
        for graph in (program.forward, *program.last_backward.parts)
    ]
    values = [t for g in graphs for n in g.calls() for t in tensors(n) if t.dim() > 1]
    return max((t[..., 0].numel() for t in values if t.shape[-1] == VOCABULARY), default=0)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {"pp": 2, "schedule": "gpipe"}),
        (2, {"pp": 2, "schedule": "1f1b"}),
        (4, {"pp": 2, "schedule": "1f1b", "tp": 2}),
        (4, {"pp": 2, "schedule": "1f1b", "zero": 3}),
    ],
)
def test_drawn_models_train_as_on_one_device(ranks: int, options: dict[str, Any]) -> None:
    run(trains_alike, ranks, seeds=[0, 3], **options)
