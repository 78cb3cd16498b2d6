"""Scripts with loops of Lightning, Fabric, accelerate, diffusers and timm, after their docs."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    get_linear_schedule_with_warmup,
)

import autopar
from benchmarks.scripts.run import Run, pictures, tokenizer
from benchmarks.scripts.trainers import BERT, tokenized


def _lightning(run: Run, **settings: Any) -> Any:
    from lightning.pytorch import Trainer

    from autopar.integrations.lightning import AutoparStrategy

    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    planned = {} if run.plan is None else {"strategy": AutoparStrategy(run.plan)}
    return Trainer(
        accelerator="cpu", devices=run.ranks, default_root_dir=run.folder, **quiet, **planned,
        **{"enable_checkpointing": False, **settings},
    )  # fmt: skip


def autoencoder(run: Run) -> nn.Module:
    """Lightning's first example: an autoencoder, Adam."""
    from lightning.pytorch import LightningModule

    class LitAutoEncoder(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(768, 16), nn.ReLU(), nn.Linear(16, 3))
            self.decoder = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 768))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, _ = batch
            x = x.view(x.size(0), -1)
            x_hat = self.decoder(self.encoder(x))
            loss = F.mse_loss(x_hat, x)
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=1e-3)

    trainer = _lightning(run, max_epochs=2)
    trainer.fit(LitAutoEncoder(), DataLoader(pictures(28), run.rows(8), shuffle=True))
    return trainer.strategy.model


def lightning_classifier(run: Run) -> nn.Module:
    """Lightning: convolutions with batch norm, torchmetrics, schedule, best checkpoint, test."""
    from lightning.pytorch import LightningModule
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
    from torchmetrics.classification import MulticlassAccuracy

    class Classifier(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
                nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5),
            )  # fmt: skip
            self.accuracy = MulticlassAccuracy(5)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            loss = F.cross_entropy(self.net(x), y)
            self.log("train_loss", loss, prog_bar=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            logits = self.net(x)
            self.accuracy(logits, y)
            self.log("val_loss", F.cross_entropy(logits, y))
            self.log("val_accuracy", self.accuracy)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    best = ModelCheckpoint(run.folder, monitor="val_loss")
    trainer = _lightning(
        run, max_epochs=3, gradient_clip_val=1.0, enable_checkpointing=True,
        callbacks=[best, EarlyStopping("val_loss")],
    )  # fmt: skip
    loaders = [DataLoader(pictures(n, seed=n), run.rows(8)) for n in (28, 10)]
    module = Classifier()
    trainer.fit(module, *loaders)
    trainer.validate(module, loaders[1], verbose=False)
    return trainer.strategy.model


def _fabric(run: Run) -> Any:
    from lightning import Fabric

    from autopar.integrations.lightning import AutoparFabricStrategy

    planned = {} if run.plan is None else {"strategy": AutoparFabricStrategy(run.plan)}
    fabric = Fabric(accelerator="cpu", devices=run.ranks, **planned)
    fabric.launch()
    return fabric


def fabric_pictures(run: Run) -> nn.Module:
    """Fabric: an image classifier, the loss in the loop, a schedule a epoch, evaluation."""
    fabric = _fabric(run)
    fabric.seed_everything(1)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(392, 5)
    )
    optimizer = torch.optim.Adadelta(net.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    model, optimizer = fabric.setup(net, optimizer)
    loaders = [DataLoader(pictures(n, seed=n), run.rows(8)) for n in (28, 10)]
    train, test = fabric.setup_dataloaders(*loaders)
    for _ in range(2):
        model.train()
        for data, target in train:
            optimizer.zero_grad()
            loss = F.nll_loss(F.log_softmax(model(data), -1), target)
            fabric.backward(loss)
            optimizer.step()
        schedule.step()
        model.eval()
        with torch.no_grad():
            for data, target in test:
                fabric.all_gather(F.cross_entropy(model(data), target))
    return model


def fabric_accumulation(run: Run) -> nn.Module:
    """Fabric: accumulation by `no_backward_sync`, clipping, a Transformer."""
    fabric = _fabric(run)
    fabric.seed_everything(1)

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(47, 16)
            self.encoder = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
            self.head = nn.Linear(16, 47)

        def forward(self, tokens: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
            return self.head(self.encoder(self.embedding(tokens), mask, is_causal=True))

    net = Transformer()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    rows = torch.randint(0, 47, (48, 9), generator=torch.Generator().manual_seed(0))
    loader = fabric.setup_dataloaders(DataLoader(rows, run.rows(8), shuffle=True))
    for index, batch in enumerate(loader):
        is_accumulating = index % 2 == 0
        with fabric.no_backward_sync(model, enabled=is_accumulating):
            logits = model(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            fabric.backward(loss / 2)
        if not is_accumulating:
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
    return model


def _accelerator(run: Run, **settings: Any) -> Any:
    if run.plan is None:
        return Accelerator(cpu=True, **settings)
    from autopar.integrations.accelerate import AutoparAccelerator

    return AutoparAccelerator(cpu=True, strategy=run.plan, **settings)


def nlp_example(run: Run) -> nn.Module:
    """accelerate's nlp_example: BERT, a linear schedule, metrics gathered."""
    accelerator = _accelerator(run)
    model = BertForSequenceClassification(BertConfig(**BERT, num_labels=3))
    collate = DataCollatorWithPadding(tokenizer())
    loaders = [
        DataLoader(tokenized(n, n).remove_columns("text"), run.rows(8), shuffle, collate_fn=collate)
        for n, shuffle in ((36, True), (11, False))
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = get_linear_schedule_with_warmup(optimizer, 2, 10)
    model, optimizer, train, held_out, schedule = accelerator.prepare(
        model, optimizer, *loaders, schedule
    )
    for _ in range(2):
        model.train()
        for batch in train:
            outputs = model(**batch)
            accelerator.backward(outputs.loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        model.eval()
        for batch in held_out:
            with torch.no_grad():
                outputs = model(**batch)
            accelerator.gather_for_metrics((outputs.logits.argmax(-1), batch["labels"]))
    return model


def accumulation_example(run: Run) -> nn.Module:
    """accelerate: `accumulate`, clipping, a model of one's own, the loss in the loop."""
    accelerator = _accelerator(run, gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Flatten(), nn.Linear(768, 16), nn.GELU(), nn.Linear(16, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(pictures(44), run.rows(8), shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return model


def diffusion(run: Run) -> nn.Module:
    """diffusers' unconditional training: UNet2DModel, DDPM noise, EMA of the weights."""
    from diffusers import DDPMScheduler, UNet2DModel
    from diffusers.optimization import get_cosine_schedule_with_warmup
    from diffusers.training_utils import EMAModel

    accelerator = _accelerator(run)
    model = UNet2DModel(
        16, 3, 3, block_out_channels=(8, 16), norm_num_groups=4, attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).double()  # fmt: skip
    noise_scheduler = DDPMScheduler(num_train_timesteps=100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(pictures(24), run.rows(8), shuffle=True)
    schedule = get_cosine_schedule_with_warmup(optimizer, 1, 6)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    average = EMAModel(model.parameters(), decay=0.9)
    torch.manual_seed(7)
    for clean, _ in loader:
        noise = torch.randn_like(clean)
        steps = torch.randint(0, 100, (len(clean),))
        noisy = noise_scheduler.add_noise(clean, noise, steps)
        with accelerator.accumulate(model):
            predicted = model(noisy, steps, return_dict=False)[0]
            accelerator.backward(F.mse_loss(predicted, noise))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        average.step(model.parameters())
    average.copy_to(model.parameters())
    return model


def _compiled(run: Run, model: nn.Module) -> nn.Module:
    return model if run.plan is None else autopar.compile(model, strategy=run.plan)


def timm_training(run: Run) -> nn.Module:
    """timm: a small ViT, mixup with soft targets, its AdamW, cosine schedule and EMA."""
    import numpy as np
    import timm
    from timm.data import Mixup
    from timm.loss import SoftTargetCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.scheduler import CosineLRScheduler

    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=16, patch_size=4, embed_dim=16, depth=2, num_heads=2,
        num_classes=5,
    ).double()  # fmt: skip
    model = _compiled(run, model)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-2, weight_decay=0.05)
    schedule = CosineLRScheduler(optimizer, t_initial=4, warmup_t=1)
    mixup = Mixup(mixup_alpha=0.8, label_smoothing=0.1, num_classes=5)
    criterion = SoftTargetCrossEntropy()
    np.random.seed(0)
    for epoch in range(2):
        for pixels, labels in DataLoader(pictures(24), 8):
            pixels, targets = mixup(pixels, labels)
            loss = criterion(model(pixels), targets)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        schedule.step(epoch + 1)
    return model


def timm_convolutions(run: Run) -> nn.Module:
    """timm: ResNet-10, label smoothing, SGD with Nesterov momentum, evaluation."""
    import timm
    from timm.loss import LabelSmoothingCrossEntropy

    model = timm.create_model("resnet10t", num_classes=5).double()
    model = _compiled(run, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    criterion = LabelSmoothingCrossEntropy(0.1)
    for _ in range(2):
        model.train()
        for pixels, labels in DataLoader(pictures(20, 32), 8):
            loss = criterion(model(pixels), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            for pixels, labels in DataLoader(pictures(9, 32, 1), 8):
                (model(pixels).argmax(-1) == labels).sum().item()
    return model
