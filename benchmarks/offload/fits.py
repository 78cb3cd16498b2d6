"""Training under a real limit of the memory of a process, in memory and on storage.

The model is in bf16, and its AdamW with amsgrad has float32 masters on storage: 16 bytes of states
a parameter.
The limit is RLIMIT_DATA, set to what Python and torch take at the start and some MiB more. The
kernel refuses private memory beyond it: files that are mapped do not count.
"""

from __future__ import annotations

import functools
import gc
import resource
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autopar
from benchmarks.offload.models import Model
from benchmarks.report import about, save
from tests.harness.worlds import Raised, run_isolated

STEPS = 3
FEWEST = 8  # layers of the first model of a search
ADAMW: Mapping[str, Any] = {"lr": 1e-4, "amsgrad": True}
WAYS: Mapping[str, tuple[int, Mapping[str, Any] | None]] = {
    "storage": (1, {"offload": "activations+parameters"}),
    "plain": (1, None),
    "recompute": (1, {"recompute": "full"}),
    "zero3": (2, {"zero": 3}),
    "activations": (1, {"offload": "activations"}),
}
"""Ranks and strategies; None is the plain model. With "storage" the states lie there, too."""


def fits(
    folder: Path, more_mib: int, rows: int, width: int, layers: int, json: Path | None
) -> bool:
    """Trains in each way under the limit; whether storage alone lives."""
    sizes = {"more": more_mib << 20, "rows": rows, "width": width, "layers": layers}
    found: dict[str, Any] = {}
    for way, (ranks, _) in WAYS.items():
        given = {"way": way, "folder": str(folder), **sizes}
        answer = run_isolated(train, ranks, timeout=3000, expect_errors=True, **given)[0]
        is_dead = isinstance(answer, Raised)
        found[way] = {"died": f"{answer.type}: {answer.message[:200]}"} if is_dead else answer
        print(f"{way}: {found[way]}", flush=True)
        if json:
            save(json, {**about(), **sizes, "ways": found})
    return [way for way, own in found.items() if "died" not in own] == ["storage"]


def largest(folder: Path, more_mib: int, rows: int, width: int, json: Path | None) -> bool:
    """Searches the most layers that train on one process; whether storage has room for the most."""
    sizes = {"more": more_mib << 20, "rows": rows, "width": width}
    found: dict[str, Any] = {}
    for way in ("plain", "recompute", "storage"):
        found[way] = {}
        alive, dead, layers = 0, None, FEWEST
        while dead is None or dead - alive > max(1, alive // 20):
            given = {"way": way, "folder": str(folder), "layers": layers, **sizes}
            answer = run_isolated(train, 1, timeout=3000, expect_errors=True, **given)[0]
            if isinstance(answer, Raised):
                dead = layers
            else:
                alive, found[way] = layers, answer
            layers = 2 * alive if dead is None else (alive + dead) // 2
            print(f"{way}: {alive} layers train, {dead} do not", flush=True)
            if json:
                save(json, {**about(), **sizes, "largest": found})
    counts = {way: answer.get("parameters", 0) for way, answer in found.items()}
    print(counts)
    return max(counts, key=lambda way: counts[way]) == "storage"


def train(
    rank: int, world_size: int, way: str, folder: str, more: int, rows: int, width: int, layers: int
) -> dict[str, Any]:
    """Some steps under the limit; losses, bytes and seconds."""
    started = status("VmData")
    resource.setrlimit(resource.RLIMIT_DATA, (started + more, started + more))
    batch = torch.randn(rows, width).bfloat16(), torch.randn(rows, width).bfloat16()
    options, is_stored = WAYS[way][1], way == "storage"
    make = functools.partial(torch.optim.AdamW, **ADAMW)
    if is_stored:
        stored = {"folder": folder, "block_bytes": "2MiB", "master_dtype": torch.float32}
        make = functools.partial(autopar.OffloadedOptimizer, torch.optim.AdamW, **stored, **ADAMW)
    model = made(width, layers, meta=options is not None)
    if options is not None:
        options = {"recompute": "none", "zero": 0, "offload_dir": folder, **options}
        strategy = autopar.Strategy(**options)
        given = {"example_inputs": batch, "optimizer": make}
        model = autopar.compile(model, strategy=strategy, **given)
        model.materialize_parameters()
    optimizer = make(model.parameters())
    gc.collect()
    before = status("RssAnon") - sum(x.nbytes for x in batch)
    losses, seconds = [], []
    with Peak() as peak:
        for _ in range(STEPS):
            begin = time.perf_counter()
            loss = model(*batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - begin)
    cost = model.plan.prediction if options is not None else None
    return {
        "losses": losses,
        "seconds": seconds,
        "parameters": sum(p.numel() for p in model.parameters()),
        "state_bytes": getattr(optimizer, "stored_bytes", 0),
        "limit": started + more,
        "compiled_bytes": before - started,
        "peak_bytes": peak.nbytes - before,
        "predicted_bytes": None if cost is None else cost.peak_bytes,
        "predicted": None if cost is None else dict(cost.memory),
        "predicted_s": None if cost is None else cost.step_s,
    }


def made(width: int, layers: int, *, meta: bool) -> nn.Module:
    """The model in bf16, as shapes alone if it is to be compiled."""
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta" if meta else "cpu"):
        model = Model(width, layers)
    torch.set_default_dtype(torch.float32)
    return model


class Peak:
    """Most anonymous memory of this process inside of the context, looked at every millisecond."""

    def __enter__(self) -> Peak:
        self.nbytes, self._ended = status("RssAnon"), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(1e-3):
            self.nbytes = max(self.nbytes, status("RssAnon"))


def status(field: str) -> int:
    """A field of this process's /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))
