"""Train a classifier with autopar: torchrun --nproc-per-node 2 after.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import autopar

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(1024, 32)
data = TensorDataset(x, x[:, :8].argmax(1))
sampler = DistributedSampler(data, seed=0)
loader = DataLoader(data, batch_size=32, sampler=sampler)

model = nn.Sequential(nn.Linear(32, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 8))
model = autopar.compile(model, batch="local", strategy="zero3")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

for epoch in range(4):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")
dist.destroy_process_group()
