"""Parts `offload` and `offload-order`: tensors in host memory and on storage beside none there."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn

import autopar
from autopar._torch import TorchDispatchMode
from autopar.core.operators import host_copies, parameters
from benchmarks.gpu.setting import MIB, Setting
from benchmarks.offload.models import Contents
from tests.harness.emulated_streams import KERNELS, emulated_streams

STEPS = 5
WHOLE = 3 / 4  # of the peak in memory, as the limit under which offload trains
AdamW = partial(torch.optim.AdamW, lr=1e-3)


@dataclass(frozen=True)
class Measured:
    losses: list[float]
    step_ms: float  # of a further step
    memory: dict[str, float]  # peaks in MiB


IN_MEMORY, EVERYTHING = Contents(), Contents("activations+parameters", states=True)
CONTENTS: Mapping[str, Contents] = {
    "activations": Contents("activations"),
    "states": Contents(states=True),
    "parameters": Contents("parameters"),
    "all": EVERYTHING,
}
TO_FILES = ("activations", "states")


def run(setting: Setting) -> None:
    """Rates of copies, then each kind of contents: losses, seconds and memory."""
    with streams(setting):
        with setting.case("copies"):
            copies(setting)
        with setting.case("in memory"), tempfile.TemporaryDirectory() as folder:
            base = measured(setting, IN_MEMORY, None)
            for name, contents in CONTENTS.items():
                with setting.case(name):
                    compare(setting, name, base, measured(setting, contents, None))
            for name in TO_FILES:
                with setting.case(f"{name} to files"):
                    found = measured(setting, CONTENTS[name], folder)
                    compare(setting, f"{name} to files", base, found)
            with setting.case("limited"):
                limited(setting, base)


def order(setting: Setting) -> None:
    """Steps under torch's CUDA sanitizer, which raises where no event orders two accesses."""
    with streams(setting), VisibleCopies():
        for name, contents in CONTENTS.items():
            with setting.case(name):
                losses = train(setting, *built(setting, contents, None))
                setting.row(name, f"loss {losses[0]:.3f} to {losses[-1]:.3f}")


class VisibleCopies(TorchDispatchMode):
    """Shows the sanitizer the copies that autopar's operators make."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in KERNELS and type(args[0]) in (torch.Tensor, nn.Parameter):  # not traced
            return KERNELS[func](*args)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def streams(setting: Setting) -> Iterator[None]:
    """Streams of the GPU, emulated in a dry run, where small parameters leave, too."""
    if not setting.dry:
        yield
        return
    with emulated_streams() as gpu, mock.patch.object(parameters, "LEAST_BYTES", 1):
        yield
    if gpu.errors:
        setting.row("order", gpu.errors[0], ok=False)


def copies(setting: Setting) -> None:
    """GB/s of pinned copies each way, and of both ways at once."""
    nbytes = MIB if setting.dry else 256 * MIB
    given = [torch.zeros(nbytes, dtype=torch.uint8, device=setting.device) for _ in range(2)]
    own = host_copies.copies_of(setting.device)
    assert own is not None
    blocks = [own.take(nbytes) for _ in range(2)]

    def out() -> None:
        own.wait(own.to_host(blocks[0], given[0]))

    def back() -> None:
        own.wait(own.from_host(given[1], blocks[1]))

    def both() -> None:
        ends = own.to_host(blocks[0], given[0]), own.from_host(given[1], blocks[1])
        for end in ends:
            own.wait(end)

    for name, call in {"to host": out, "from host": back, "both ways": both}.items():
        milliseconds = setting.timed(call)[1]
        rate = nbytes * (1 + (call is both)) / milliseconds / 1e6
        setting.row(name, f"{rate:.1f} GB/s", device_ms=milliseconds)


def built(
    setting: Setting, contents: Contents, folder: str | None
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The compiled GPT and its optimizer."""
    strategy = autopar.Strategy(
        zero=0, recompute="none", offload=contents.strategy, offload_dir=folder
    )
    torch.manual_seed(0)
    model = setting.gpt().to(setting.device)
    cluster = autopar.Cluster.default(1, "cuda") if setting.dry else None
    compiled = autopar.compile(
        model,
        example_inputs=setting.tokens(),
        strategy=strategy,
        cluster=cluster,
        fallback=False,
    )
    stored = partial(autopar.OffloadedOptimizer, AdamW.func, folder=folder, **AdamW.keywords)
    make = stored if contents.states else AdamW
    return compiled, make(compiled.parameters())


def train(setting: Setting, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """The loss of every step."""
    losses = []
    for step in range(STEPS):
        loss = model(*setting.tokens(seed=step % 4))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


def compare(setting: Setting, name: str, base: Measured, found: Measured) -> None:
    """Writes a row beside the step in memory; losses are equal bit for bit."""
    losses = found.losses
    own = host_copies.copies_of(setting.device)
    assert own is not None
    setting.row(
        name,
        f"{STEPS} steps, loss {losses[0]:.3f} to {losses[-1]:.3f}; "
        f"{own.pinned_bytes / MIB:.0f} MiB pinned by now",
        ok=losses == base.losses,
        device_ms=found.step_ms,
        ratio=found.step_ms / base.step_ms,
        **found.memory,
    )


def measured(setting: Setting, contents: Contents, folder: str | None) -> Measured:
    """Trains, and times further steps."""
    model, optimizer = built(setting, contents, folder)
    setting.reset_memory()
    losses, batch = train(setting, model, optimizer), setting.tokens()

    def step() -> None:
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    _, milliseconds = setting.timed(step, runs=3 if setting.dry else 10)
    return Measured(losses, milliseconds, setting.memory())


def limited(setting: Setting, base: Measured) -> None:
    """All offloaded trains under a limit where the plain model runs out of memory."""
    plain, limit = list[float](), WHOLE * base.memory["reserved_mib"] * MIB
    if not setting.dry:
        total = torch.cuda.get_device_properties(setting.device).total_memory
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(limit / total)
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            plain = measured(setting, IN_MEMORY, None).losses
        torch.cuda.empty_cache()
    found = measured(setting, EVERYTHING, None)
    losses, died = found.losses, "trained, too" if plain else "did not train"
    setting.row(
        "limited",
        f"under {limit / MIB:.0f} MiB: loss {losses[0]:.3f} to {losses[-1]:.3f}; "
        f"in memory it {died}",
        ok=losses[-1] < losses[0] and not plain,
        **found.memory,
    )
