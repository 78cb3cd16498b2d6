"""Parts `parity`, `inductor`, `syncs`, `two-processes`: training steps beside the plain model's."""

from __future__ import annotations

import copy
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import autopar
from autopar._torch import TorchDispatchMode
from benchmarks.gpu.setting import MIB, DropoutBlock, Setting
from benchmarks.launch import ROOT

STEPS = 20
AdamW = partial(torch.optim.AdamW, lr=1e-3)


@dataclass(frozen=True)
class Training:
    """One way to train.

    Attributes:
        tolerance: largest relative difference of losses from the plain model's.
        scales: whether a GradScaler scales the loss.
        clips: whether gradients are clipped to a norm of 0.1.
        meta: whether the model is built on the meta device.
    """

    options: Mapping[str, Any] = field(default_factory=dict)  # of autopar.compile
    tolerance: float = 1e-4
    optimizer: Callable[..., torch.optim.Optimizer] = AdamW
    scales: bool = False
    clips: bool = False
    meta: bool = False


ALONE: Mapping[str, Training] = {
    "fp32": Training(),
    "bf16": Training({"precision": "bf16"}, 1e-2),
    "fp16 + GradScaler": Training({"precision": "fp16"}, 1e-2, scales=True),
    "recompute full": Training({"strategy": autopar.Strategy(zero=0, recompute="full")}),
    "fused AdamW": Training(optimizer=partial(AdamW, fused=True)),
    "meta init": Training(meta=True),
}
INDUCTOR: Mapping[str, Training] = {
    "inductor": Training({"backend": "inductor"}, 1e-3),
    "inductor bf16": Training({"backend": "inductor", "precision": "bf16"}, 1e-2),
}
TWO: Mapping[str, Training] = {
    "zero1": Training({"strategy": "zero1"}),
    "zero3": Training({"strategy": "zero3"}),
    "zero3 bf16": Training({"strategy": "zero3", "precision": "bf16"}, 1e-2),
    "tp2": Training({"strategy": autopar.Strategy(tp=2, zero=0)}),
    "zero3, clipped": Training({"strategy": "zero3"}, clips=True),
    "tp2 fp16 + GradScaler": Training(
        {"strategy": autopar.Strategy(tp=2, zero=0), "precision": "fp16"}, 1e-2, scales=True
    ),
}


def parity(setting: Setting) -> None:
    for name, training in ALONE.items():
        with setting.case(name):
            compare(setting, name, training)


def inductor(setting: Setting) -> None:
    small = replace(setting, layers=2)
    for name, training in INDUCTOR.items():
        with small.case(name):
            compare(small, name, training, steps=5)


def two_processes(setting: Setting) -> None:
    dist.init_process_group("gloo")
    small = replace(setting, layers=2)
    for name, training in TWO.items():
        with small.case(name):
            compare(small, name, training, steps=5)
    with setting.case("dropout"):
        draws(small)
    with setting.case("checkpoint"):
        save_and_load(small)
    dist.destroy_process_group()


def compare(setting: Setting, name: str, training: Training, steps: int = STEPS) -> None:
    """Train the plain model and autopar's on the same batches; write the worst difference."""
    options = {"strategy": "ddp", **training.options}
    torch.manual_seed(0)
    model = setting.gpt().to(setting.device)
    if training.meta:
        with torch.device("meta"):
            given = setting.gpt()
    else:
        given = copy.deepcopy(model)
    setting.reset_memory()
    parallel = autopar.compile(
        given,
        example_inputs=setting.tokens(),
        optimizer=training.optimizer,
        fallback=False,
        **options,
    )
    if training.meta:
        model.load_state_dict(parallel.state_dict())
    state = copy.deepcopy(model.state_dict())
    losses = train(setting, parallel, training, steps)
    memory, predicted = setting.memory(), parallel.plan and parallel.plan.prediction
    model.load_state_dict(state)
    precision = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(options.get("precision", ""))
    want = train(setting, model, training, steps, precision)
    worst = max(abs(a - b) / abs(b) for a, b in zip(losses, want, strict=True))
    fell = losses[-1] < losses[0]
    setting.row(
        name,
        f"{steps} steps, loss {losses[0]:.3f} to {losses[-1]:.3f}",
        ok=worst <= training.tolerance and fell,
        error=worst,
        predicted_mib=predicted.peak_bytes / MIB if predicted else None,
        **memory,
    )


def train(
    setting: Setting,
    model: nn.Module,
    training: Training,
    steps: int,
    autocast: torch.dtype | None = None,
) -> list[float]:
    """Return the loss of every step; `autocast` is for the plain model."""
    optimizer = training.optimizer(model.parameters())
    kind = setting.device.type
    scaler = torch.amp.GradScaler(kind, enabled=training.scales)
    losses = []
    for step in range(steps):
        with torch.autocast(kind, dtype=autocast, enabled=autocast is not None):
            loss = model(*setting.tokens(seed=step % 4))
        scaler.scale(loss).backward()
        if training.clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


def draws(setting: Setting) -> None:
    """Two runs with dropout from one seed are equal, and the ranks agree."""
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        model = setting.gpt(DropoutBlock).to(setting.device)
        strategy = autopar.Strategy(tp=2, zero=0)
        parallel = autopar.compile(
            model, example_inputs=setting.tokens(), strategy=strategy, fallback=False
        )
        torch.manual_seed(1)
        found.append(train(setting, parallel, Training(), 5))
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, found)
    same = found[0] == found[1] and all(own == by_rank[0] for own in by_rank)
    setting.row("dropout", f"losses {found[0][-1]:.6f}, {found[1][-1]:.6f}", ok=same)


def save_and_load(setting: Setting) -> None:
    """A checkpoint of zero3 loads under tp2: the loss is the same."""
    folder: list[Any] = [TemporaryDirectory() if setting.rank == 0 else None]
    path = [folder[0].name if folder[0] else None]
    dist.broadcast_object_list(path)
    losses, batch = [], setting.tokens()
    for strategy in (autopar.Strategy(zero=3), autopar.Strategy(tp=2, zero=0)):
        torch.manual_seed(len(losses))
        model = setting.gpt().to(setting.device)
        parallel = autopar.compile(model, example_inputs=batch, strategy=strategy, fallback=False)
        state = get_model_state_dict(parallel)
        if losses:
            checkpoint.load(state, checkpoint_id=Path(path[0]))
            set_model_state_dict(parallel, state)
        else:
            checkpoint.save(state, checkpoint_id=Path(path[0]))
        losses.append(float(parallel(*batch).detach()))
    error = abs(losses[1] - losses[0]) / losses[0]
    setting.row("checkpoint", "saved under zero3, loaded under tp2", ok=error < 1e-5, error=error)
    dist.barrier()


# -- synchronising calls -----------------------------------------------------------------------


class HostReads(TorchDispatchMode):
    """Collects autopar's lines that read values of tensors, for which a GPU would be awaited."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and (line := _line("autopar")):
            self.lines.append(line)
        return func(*args, **(kwargs or {}))


def syncs(setting: Setting) -> None:
    """Write the synchronising calls of the third step, forward to optimizer, with their lines."""
    for name, options in {"fp32": {}, "bf16": {"precision": "bf16"}}.items():
        with setting.case(name):
            model = setting.gpt().to(setting.device)
            batch = setting.tokens()
            parallel = autopar.compile(
                model, example_inputs=batch, strategy="ddp", fallback=False, **options
            )
            optimizer = torch.optim.AdamW(parallel.parameters(), foreach=not setting.dry)

            def step(
                model: nn.Module = parallel,
                optimizer: torch.optim.Optimizer = optimizer,
                batch: tuple[Tensor, Tensor] = batch,
            ) -> None:
                model(*batch).backward()
                optimizer.step()
                optimizer.zero_grad()

            step()
            step()
            lines = host_reads(step) if setting.dry else synchronising_calls(step)
            setting.row(name, "; ".join(lines[:5]) or "none", ok=not lines, count=len(lines))


def host_reads(step: Callable[[], None]) -> list[str]:
    with HostReads() as reads:
        step()
    return reads.lines


def synchronising_calls(step: Callable[[], None]) -> list[str]:
    """Return the lines of a step that wait for the GPU."""
    found: list[str] = []
    show = warnings.showwarning
    torch.cuda.set_sync_debug_mode("warn")  # itself warns, the first time, that it is a prototype
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: found.append(
            f"{_line('autopar') or _line('')}: {str(message)[:80]}"
        )
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
            warnings.showwarning = show
    return found


def _line(package: str) -> str:
    """Return the innermost running line of a package, "" if there is none."""
    for frame in reversed(traceback.extract_stack()[:-2]):
        if frame.filename.startswith(str(ROOT / package)) and "torch" not in frame.filename:
            return f"{Path(frame.filename).name}:{frame.lineno}"
    return ""
