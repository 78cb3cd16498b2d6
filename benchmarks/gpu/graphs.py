"""Part `cuda-graphs`: losses bit for bit those without graphs, and the host time that they save."""

from __future__ import annotations

import copy
from typing import Any

import torch

import autopar
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.steps import stepper
from benchmarks.gpu.training import Training, train

STEPS = 8


def run(setting: Setting) -> None:
    for precision in (None, "bf16"):
        name = precision or "fp32"
        with setting.case(name):
            compare(setting, name, precision)


def compare(setting: Setting, name: str, precision: str | None) -> None:
    """Train twice from the same parameters, with graphs and without."""
    torch.manual_seed(0)
    model, batch = setting.gpt().to(setting.device), setting.tokens()
    losses, hosts, devices = [], [], []
    for recorded in (False, True):
        options: dict[str, Any] = {} if setting.dry else {"cuda_graphs": recorded}
        compiled = autopar.compile(
            copy.deepcopy(model),
            example_inputs=batch,
            strategy="ddp",
            precision=precision,
            fallback=False,
            **options,
        )
        losses.append(train(setting, compiled, Training(), STEPS))
        host_ms, device_ms = setting.timed(stepper(compiled, batch, None))
        hosts.append(host_ms)
        devices.append(device_ms)
    setting.row(
        name,
        f"{STEPS} steps; host {hosts[0]:.1f} ms without graphs, {hosts[1]:.1f} with",
        ok=losses[0] == losses[1] and (setting.dry or hosts[1] < hosts[0]),
        host_ms=hosts[1],
        device_ms=devices[1],
        ratio=devices[1] / devices[0],
    )
