"""Train a LightningModule; only the strategy of its Trainer changes.

torchrun --nproc-per-node 2 examples/lightning_fit.py
"""

import argparse

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from autopar.integrations.lightning import AutoparStrategy

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--out", default="runs/lightning")
args = parser.parse_args()


class Classifier(lightning.LightningModule):
    """A classifier of points by their largest coordinate."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 128), nn.GELU(), nn.Linear(128, 16))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.layers(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.print(f"epoch {self.current_epoch}: loss {self.trainer.callback_metrics['loss']:.3f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


lightning.seed_everything(0)
x = torch.randn(1024, 16)
loader = DataLoader(TensorDataset(x, x.argmax(1)), batch_size=32, shuffle=True)
trainer = lightning.Trainer(
    accelerator="auto",
    devices="auto" if torch.cuda.is_available() else 2,
    strategy=AutoparStrategy("zero3"),
    max_epochs=args.epochs,
    gradient_clip_val=1.0,
    default_root_dir=args.out,
)
trainer.fit(Classifier(), loader)
