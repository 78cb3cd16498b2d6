"""Train a vision transformer in bf16; each rank loads rows of its own.

torchrun --nproc-per-node 2 examples/vit.py
"""

import argparse

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from transformers import ViTConfig, ViTForImageClassification

import autopar

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--images", type=int, default=2048)
parser.add_argument("--workers", type=int, default=2)
args = parser.parse_args()


class Squares(Dataset):
    """Noise with a bright square in one of 16 places; take torchvision's ImageFolder instead."""

    def __len__(self) -> int:
        return args.images

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(index))
        row, column = divmod(index % 16, 4)
        image[:, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8] += 1.0
        return image, index % 16


dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
torch.manual_seed(0)
data = Squares()
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=32, sampler=sampler, num_workers=args.workers)

sizes = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 4}
vit = ViTConfig(image_size=32, patch_size=8, num_attention_heads=4, num_labels=16, **sizes)
model = ViTForImageClassification(vit)
model = autopar.compile(model, batch="local", precision="bf16", strategy="zero1")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)

for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        loss = F.cross_entropy(model(images).logits.float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {loss.item():.3f}")
dist.destroy_process_group()
