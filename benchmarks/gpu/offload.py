"""Parts `offload` and `offload-order`: tensors in host memory and on storage beside none there."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

import autopar
from autopar._torch import FakeTensor, TorchDispatchMode
from autopar.operators import host_copies, parameters
from benchmarks.gpu.setting import MIB, Setting
from tests.harness.emulated_streams import KERNELS, emulated_streams

STEPS = 5
WHOLE = 3 / 4  # of the peak in memory, as the limit under which offload trains
AdamW = partial(torch.optim.AdamW, lr=1e-3)
Make = Callable[..., torch.optim.Optimizer]


@dataclass(frozen=True)
class Contents:
    """What leaves the GPU: the value of `Strategy.offload`, and states of the optimizer."""

    strategy: str = "none"
    states: bool = False
    to_files: bool = False


CONTENTS: Mapping[str, Contents] = {
    "activations": Contents("activations"),
    "activations to files": Contents("activations", to_files=True),
    "states": Contents(states=True),
    "states to files": Contents(states=True, to_files=True),
    "parameters": Contents("parameters"),
    "all": Contents("activations+parameters", states=True),
}


def run(setting: Setting) -> None:
    """Rates of copies, then each kind of contents: losses, seconds and memory."""
    with streams(setting):
        with setting.case("copies"):
            copies(setting)
        with tempfile.TemporaryDirectory() as folder:
            for name, contents in CONTENTS.items():
                with setting.case(name):
                    compare(setting, name, contents, folder)
        with setting.case("limited"):
            limited(setting)


def order(setting: Setting) -> None:
    """Steps under torch's CUDA sanitizer, which raises where no event orders two accesses."""
    with streams(setting), VisibleCopies():
        for name in ("activations", "parameters", "states", "all"):
            with setting.case(name):
                model, make = built(setting, CONTENTS[name], None)
                losses = train(setting, model, make)
                setting.row(name, f"loss {losses[0]:.3f} to {losses[-1]:.3f}")


class VisibleCopies(TorchDispatchMode):
    """Shows the sanitizer the copies that autopar's operators make."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in KERNELS and not isinstance(args[0], FakeTensor):
            return KERNELS[func](*args)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def streams(setting: Setting) -> Iterator[None]:
    """Streams of the GPU, emulated in a dry run."""
    if not setting.dry:
        yield
        return
    with emulated_streams() as gpu:
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


def built(setting: Setting, contents: Contents, folder: str | None) -> tuple[nn.Module, Make]:
    """The compiled GPT, and the maker of its optimizer."""
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
    return compiled, stored if contents.states else AdamW


def train(setting: Setting, model: nn.Module, make: Make, steps: int = STEPS) -> list[float]:
    """The loss of every step."""
    optimizer, losses = make(model.parameters()), []
    for step in range(steps):
        loss = model(*setting.tokens(seed=step % 4))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


def compare(setting: Setting, name: str, contents: Contents, folder: str) -> None:
    """Trains in memory and offloaded; losses are equal bit for bit."""
    want, in_memory_ms, _ = measured(setting, Contents(), None)
    losses, milliseconds, memory = measured(
        setting, contents, folder if contents.to_files else None
    )
    own = host_copies.copies_of(setting.device)
    assert own is not None
    setting.row(
        name,
        f"{STEPS} steps, loss {losses[0]:.3f} to {losses[-1]:.3f}; "
        f"{own.pinned_bytes / MIB:.0f} MiB pinned by now",
        ok=losses == want,
        device_ms=milliseconds,
        ratio=milliseconds / in_memory_ms,
        **memory,
    )


def measured(
    setting: Setting, contents: Contents, folder: str | None
) -> tuple[list[float], float, dict[str, float]]:
    """Losses, milliseconds of a further step, and peaks of memory."""
    with small(setting):
        model, make = built(setting, contents, folder)
        setting.reset_memory()
        losses, optimizer = train(setting, model, make), make(model.parameters())
        batch = setting.tokens()

        def step() -> None:
            model(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()

        return losses, setting.timed(step, runs=3 if setting.dry else 10)[1], setting.memory()


@contextlib.contextmanager
def small(setting: Setting) -> Iterator[None]:
    """Lets small parameters of a dry run leave."""
    before = parameters.LEAST_BYTES
    parameters.LEAST_BYTES = 1 if setting.dry else before
    try:
        yield
    finally:
        parameters.LEAST_BYTES = before


def limited(setting: Setting) -> None:
    """All offloaded trains under a limit where the plain model runs out of memory."""
    plain, peak = [], 0.0
    if not setting.dry:
        peak = measured(setting, Contents(), None)[2]["reserved_mib"] * MIB
        total = torch.cuda.get_device_properties(setting.device).total_memory
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(WHOLE * peak / total)
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            plain = measured(setting, Contents(), None)[0]
        torch.cuda.empty_cache()
    losses, _, memory = measured(setting, CONTENTS["all"], None)
    died = "trained, too" if plain else "did not train"
    setting.row(
        "limited",
        f"under {WHOLE * peak / MIB:.0f} MiB: loss {losses[0]:.3f} to {losses[-1]:.3f}; "
        f"in memory it {died}",
        ok=losses[-1] < losses[0] and not plain,
        **memory,
    )
    if not setting.dry:
        torch.cuda.set_per_process_memory_fraction(1.0)
