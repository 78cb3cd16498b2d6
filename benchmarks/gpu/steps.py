"""Part `steps`: a block and a whole step of three models, predicted and measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from autopar.cost_model.host import device_name
from benchmarks.gpu.setting import MIB, Setting
from benchmarks.models import GPT, ConvNet

WITHIN = (0.8, 1.25)  # predicted over measured of what counts as right


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    precision: str | None


def cases(setting: Setting) -> Mapping[str, Case]:
    if setting.dry:
        small = {"layers": 2, "vocabulary": 128, "width": 32, "heads": 4, "length": 16}
        sizes = {"GPT-2, 12 layers": small}
    else:
        large = {"vocabulary": 50304, "width": 2048, "heads": 16, "length": 2048}
        sizes = {
            "block of 1B": {**large, "layers": 1, "vocabulary": 1024},
            "GPT-2, 12 layers": {
                "layers": 12,
                "vocabulary": 50304,
                "width": 768,
                "heads": 12,
                "length": 1024,
            },
            "GPT of 1B, 16 layers": {**large, "layers": 16},
        }
    named = {
        name: Case(
            partial(GPT, **options),  # type: ignore[arg-type]
            partial(text, setting, options["vocabulary"], options["length"]),
            "bf16",
        )
        for name, options in sizes.items()
    }
    rows = 8 if setting.dry else 512
    return named | {"conv net": Case(ConvNet, partial(setting.images, rows), None)}


def text(setting: Setting, vocabulary: int, length: int) -> tuple[Tensor, Tensor]:
    rows = 4 if setting.dry else 8
    drawn = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (rows, length + 1), generator=drawn).to(setting.device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def run(setting: Setting) -> None:
    for name, case in cases(setting).items():
        with setting.case(name):
            measure(setting, name, case)


def measure(setting: Setting, name: str, case: Case) -> None:
    """Write the plain step, the compiled one, and both predictions."""
    batch = case.batch()
    plain_ms, plain_memory = plain(setting, case, batch)
    setting.row(f"{name}: eager", "", device_ms=plain_ms, **plain_memory)
    with setting.case(f"{name}: from the data sheet"):
        on_paper = planned(setting, case, batch)
        compare(setting, f"{name}: from the data sheet", on_paper, plain_ms, plain_memory)
    model = build(setting, case)
    setting.reset_memory()
    compiled = autopar.compile(
        model, example_inputs=batch, strategy="ddp", precision=case.precision, fallback=False
    )
    step = stepper(compiled, batch, None)
    for _ in range(2):
        step()
    setting.reset_memory()
    host_ms, device_ms = setting.timed(step)
    memory = setting.memory()
    compare(setting, f"{name}: timed here", compiled.plan, device_ms, memory, host_ms=host_ms)
    setting.row(
        f"{name}: over eager",
        "a step compiled over the plain one",
        ok=setting.dry or device_ms <= 1.05 * plain_ms,
        ratio=device_ms / plain_ms,
    )


def build(setting: Setting, case: Case) -> nn.Module:
    torch.manual_seed(0)
    with setting.device:
        return case.make()


def planned(setting: Setting, case: Case, batch: Any) -> autopar.Plan:
    """Return the plan of one rank, made without the GPU's own times, since the model has none."""
    with torch.device("meta"):
        model = case.make().to_empty(device="cpu")
    elsewhere = tuple(tensor.cpu() for tensor in batch)
    cluster = "dgx-h100" if setting.dry else cluster_of(device_name(setting.device))
    return autopar.plan(
        model,
        1,
        example_inputs=elsewhere,
        strategy="ddp",
        precision=case.precision,
        cluster=autopar.Cluster.named(cluster, 1),
    )


def cluster_of(device: str) -> str:
    return next((f"dgx-{n.lower()}" for n in ("A100", "H200", "B200") if n in device), "dgx-h100")


def plain(setting: Setting, case: Case, batch: Any) -> tuple[float, dict[str, float]]:
    """Return milliseconds of the eager step under autocast, and its memory."""
    model = build(setting, case)
    step = stepper(model, batch, torch.bfloat16 if case.precision else None)
    for _ in range(2):
        step()
    setting.reset_memory()
    return setting.timed(step)[1], setting.memory()


def stepper(model: nn.Module, batch: Any, autocast: torch.dtype | None) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters())
    device = batch[0].device.type

    def step() -> None:
        with torch.autocast(device, dtype=autocast, enabled=autocast is not None):
            loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def compare(
    setting: Setting,
    name: str,
    plan: autopar.Plan | None,
    device_ms: float,
    memory: Mapping[str, float],
    **figures: float,
) -> None:
    """Write a prediction beside a measured step."""
    assert plan is not None
    assert plan.prediction is not None
    predicted_ms = 1e3 * plan.prediction.step_s
    predicted_mib = plan.prediction.peak_bytes / MIB
    ratio = predicted_ms / device_ms
    measured_mib = memory["allocated_mib"] or predicted_mib
    right = all(WITHIN[0] <= x <= WITHIN[1] for x in (ratio, predicted_mib / measured_mib))
    setting.row(
        name,
        f"peak {predicted_mib / measured_mib:.2f} of the measured one",
        ok=setting.dry or right,
        predicted_ms=predicted_ms,
        device_ms=device_ms,
        ratio=ratio,
        predicted_mib=predicted_mib,
        memory_ratio=predicted_mib / measured_mib,
        **memory,
        **figures,
    )
