"""Libraries beside a compiled model: averages, adapters, metrics and loaders."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import autopar
from tests.harness.training import ADAMW, SGD, close, fixed
from tests.harness.worlds import run
from tests.training.test_optimizers import batch, make_regressor

f64 = torch.float64


def average(rank: int, world_size: int) -> None:
    """An exponential average of shards, by torch's own class."""
    models = [make_regressor(), autopar.compile(make_regressor(), strategy=fixed(3))]
    models[1](*batch(0))  # plans
    averages = [AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for m in models]
    optimizers = [ADAMW(m.parameters()) for m in models]
    for seed in range(3):
        for model, optimizer, mean in zip(models, optimizers, averages, strict=True):
            model(*batch(seed)).backward()
            optimizer.step()
            optimizer.zero_grad()
            mean.update_parameters(model)
    close(averages[1].module.full_state_dict(), averages[0].module.state_dict())
    close(averages[1](*batch(5)), averages[0](*batch(5)))


def test_averaged_models() -> None:
    run(average, 2)


def adapt(rank: int, world_size: int, folder: str) -> None:
    """LoRA by peft: only adapters are trained and saved."""
    import peft
    from transformers import GPT2LMHeadModel

    from tests.runtime.states.test_user_class import make_gpt

    def make() -> Any:
        torch.manual_seed(1)
        config = peft.LoraConfig(target_modules=["c_attn"], r=4, init_lora_weights=False)
        model = peft.get_peft_model(make_gpt(), config)
        return model.double().eval()

    ids = torch.randint(1, 64, (4, 8), generator=torch.Generator().manual_seed(0))
    for name, strategy in {"zero3": fixed(3), "tp": fixed(0, tp=2)}.items():
        plain, model = make(), autopar.compile(make(), strategy=strategy, fallback=False)
        for each in (plain, model):
            optimizer = SGD([p for p in each.parameters() if p.requires_grad])
            for _ in range(2):
                each(input_ids=ids, labels=ids, use_cache=False).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        close(model.full_state_dict(), plain.state_dict())
        assert isinstance(model, peft.PeftModel)
        model.save_pretrained(f"{folder}/{name}")
        loaded = peft.PeftModel.from_pretrained(make_gpt(), f"{folder}/{name}")
        assert isinstance(loaded.get_base_model(), GPT2LMHeadModel)
        close(loaded(input_ids=ids, labels=ids).loss, plain(input_ids=ids, labels=ids).loss)


@pytest.mark.slow
def test_lora_adapters(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    run(adapt, 2, folder=str(tmp_path))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        scores = self.layers(x)
        return nn.functional.cross_entropy(scores, y), scores


def make_classifier() -> nn.Module:
    torch.manual_seed(3)
    return Classifier().double()


def load(rank: int, world_size: int) -> None:
    """Rows by DistributedSampler, metrics by torchmetrics, a loader resumed in an epoch."""
    import torchmetrics
    from torchdata.stateful_dataloader import StatefulDataLoader

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, 6, generator=generator, dtype=f64)
    data = TensorDataset(x, torch.randint(0, 4, (24,), generator=generator))
    plain = make_classifier()
    model = autopar.compile(make_classifier(), strategy=fixed(3), batch="local", fallback=False)
    optimizers = [ADAMW(m.parameters()) for m in (plain, model)]
    sampler = DistributedSampler(data, shuffle=False)
    for own, both in zip(DataLoader(data, 4, sampler=sampler), DataLoader(data, 8), strict=True):
        losses = [m(*rows)[0] for m, rows in ((plain, both), (model, own))]
        close(losses[1], losses[0])  # rows of the sampler interleave: the same 8 a step
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    metric = torchmetrics.Accuracy("multiclass", num_classes=4)
    alone = torchmetrics.Accuracy("multiclass", num_classes=4, sync_on_compute=False)
    with torch.no_grad():
        for own, both in zip(
            DataLoader(data, 4, sampler=sampler), DataLoader(data, 8), strict=True
        ):
            metric.update(model(*own)[1], own[1])
            alone.update(plain(*both)[1], both[1])
    assert metric.compute() == alone.compute()
    loader = StatefulDataLoader(data, 4, sampler=DistributedSampler(data, seed=1))
    rows = iter(loader)
    next(rows)
    state, rest = loader.state_dict(), [x for x, _ in rows]
    resumed = StatefulDataLoader(data, 4, sampler=DistributedSampler(data, seed=1))
    resumed.load_state_dict(state)
    assert all(map(torch.equal, rest, [x for x, _ in resumed]))


def test_loaders_and_metrics() -> None:
    pytest.importorskip("torchmetrics")
    pytest.importorskip("torchdata")
    run(load, 2)


def embed(rank: int, world_size: int) -> None:
    """Sparse gradients, and with them SparseAdam, are refused."""
    model = nn.Sequential(nn.Embedding(12, 4, sparse=True))
    model = autopar.compile(model, strategy=fixed(0), fallback=False)
    with pytest.raises(autopar.CaptureError, match=r"is a sparse tensor; use dense ones"):
        model(torch.arange(8))


def test_sparse_gradients() -> None:
    run(embed, 2)
