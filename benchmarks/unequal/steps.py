"""One training step, timed."""

from __future__ import annotations

import time
from typing import Any

import torch


def step(model: Any, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> float:
    begin = time.perf_counter()
    model(ids, ids).backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - begin
