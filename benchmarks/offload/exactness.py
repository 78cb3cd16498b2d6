"""Parity of training with offloaded tensors, resumed in the middle, with the plain model.

Without a folder the CPU stands for a GPU with emulated streams, and tensors go to its host.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.optim import Optimizer

import autopar
from autopar.core.common.world import world_size
from autopar.core.operators import offload, parameters
from autopar.passes import pipeline
from autopar.passes.memory.offload_activations import OffloadActivations
from benchmarks.exactness.parity import CASES
from benchmarks.memoize import memoized_capture
from benchmarks.offload.models import Contents
from benchmarks.report import about, save
from tests.harness.emulated_streams import emulated_streams
from tests.harness.models import MODELS, Case
from tests.harness.reference import Reference, batches, snapshot, worst_error, worst_loss
from tests.harness.training import ADAMW, EXACT, fixed
from tests.harness.worlds import RankError, run

NAMES = (*MODELS, "llama", "bert", "t5", "resnet")
ROWS, STEPS, PARTS = 8, 4, 2
PLANS: Mapping[str, Mapping[str, Any]] = {
    "single": {},
    "zero1": {"zero": 1},
    "zero3": {"zero": 3},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2, "micro_batches": 2},
}


CONTENTS = {
    "activations": Contents("activations"),
    "states": Contents(states=True),
    "activations+states": Contents("activations", True),
    "parameters": Contents("parameters"),
    "all": Contents("activations+parameters", True),
}


@dataclass(frozen=True)
class Row:
    model: str
    plan: str
    contents: str
    loss_error: float | None = None  # worst relative difference of a loss, on any rank
    parameter_error: float | None = None  # worst relative difference of a tensor of the state
    tensor: str | None = None  # name of that tensor
    error: str | None = None  # first line of an exception

    @property
    def is_exact(self) -> bool:
        errors = (self.loss_error, self.parameter_error)
        return all(e is not None and e <= EXACT[torch.float64] for e in errors)


def sweep(
    folder: Path | None,
    models: Sequence[str],
    plans: Sequence[str],
    contents: Sequence[str],
    json: Path | None,
) -> bool:
    """Trains every model under every plan with each contents; whether all were exact."""
    rows: list[Row] = []
    for name, plan in itertools.product(models, plans):
        if not suits(name, plan):
            continue
        for kind in contents:
            rows.append(row := measure(name, plan, kind, folder))
            told = row.error or f"{row.loss_error:.1e}, {row.parameter_error:.1e}"
            missed = "" if row.is_exact else "  NOT EXACT"
            print(f"{name} {plan} {kind}: {told}{missed}", flush=True)
            if json:
                save(json, {**about(), "rows": [asdict(each) for each in rows]})
    print(f"{sum(row.is_exact for row in rows)} of {len(rows)} are exact")
    return all(row.is_exact for row in rows)


def suits(model: str, plan: str) -> bool:
    """Whether a model trains exactly under a plan in memory."""
    return model != "dropout" or plan in ("single", "tp2")  # ranks draw other numbers for rows


def measure(name: str, plan: str, contents: str, folder: Path | None) -> Row:
    """Trains one model under one plan, on processes that later cases use again."""
    options = {"name": name, "plan": plan, "contents": contents, "folder": str(folder or "")}
    try:
        answers = run(train_on_rank, 1 if plan == "single" else 2, timeout=600, **options)
    except RankError as error:
        trace = next(iter(error.errors.values()))
        raised = [line for line in trace.splitlines() if line[:1].isalpha() and "Error" in line]
        return Row(name, plan, contents, error=raised[0][:400] if raised else "a rank failed")
    want = train_plain(name)
    loss = max(worst_loss(got, want) for got in answers)
    state, tensor = max(worst_error(got.state, want.state) for got in answers)
    return Row(name, plan, contents, loss, state, tensor)


def train_on_rank(
    rank: int, world_size: int, name: str, plan: str, contents: str, folder: str
) -> Reference:
    """Trains on one rank, to host memory if `folder` is ""."""
    warnings.simplefilter("ignore")
    if folder:
        trained = train_halves(name, plan, CONTENTS[contents], folder)
        if CONTENTS[contents].strategy != "none":
            assert offload.storage_in(folder).size, "nothing was on storage"
        return trained
    with emulated_streams() as gpu:
        trained = train_halves(name, plan, CONTENTS[contents], None)
    assert gpu.copies, "nothing was in host memory"
    assert not gpu.errors, gpu.errors[0]
    return trained


def train_halves(name: str, plan: str, chosen: Contents, folder: str | None) -> Reference:
    """Trains on one rank; another model and optimizer go on from the middle."""
    case, losses = CASES[name], list[float]()
    options = dict(PLANS[plan])
    if name in ("conv", "resnet"):
        options.pop("micro_batches", None)  # batch norm sees all rows
    strategy = fixed(**options, offload=chosen.strategy, offload_dir=folder)
    cluster = None if folder else autopar.Cluster.default(world_size(), "cuda")
    saved: Any = None
    for steps in halves():
        with everything_leaves(), memoized_capture(captures(name)):
            made = case.make().double()
            given = example(made, case)
            model: Any = autopar.compile(
                made, strategy=strategy, example_inputs=given, cluster=cluster, fallback=False
            )
            optimizer = optimizer_of(model, chosen, folder)
            if saved:
                model.load_full_state_dict(saved[0])
                model.load_full_optimizer_state_dict(optimizer, saved[1])
                model.rng_state = saved[2]
            losses += train(model, optimizer, case, steps)
            states = model.full_state_dict(), model.full_optimizer_state_dict(optimizer)
            saved = *states, model.rng_state
    return Reference(losses, snapshot(saved[0]))


@functools.cache
def train_plain(name: str) -> Reference:
    """Trains the plain model from the seed of the ranks."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        case = CASES[name]
        model = case.make().double()
        losses = train(model, ADAMW(model.parameters()), case, range(STEPS))
    return Reference(losses, snapshot(model.state_dict()))


def train(model: nn.Module, optimizer: Optimizer, case: Case, steps: Iterable[int]) -> list[float]:
    """Steps of accumulated batches; the losses."""
    losses = []
    for step in steps:
        for args, kwargs in batches(case, range(PARTS * step, PARTS * (step + 1)), ROWS):
            loss = case.loss(model(*args, **kwargs))
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def halves() -> Iterator[range]:
    yield range(STEPS // 2)
    yield range(STEPS // 2, STEPS)


def optimizer_of(model: nn.Module, contents: Contents, folder: str | None) -> Optimizer:
    """The optimizer of the reference, with its states offloaded if they are to be."""
    if not contents.states:
        return ADAMW(model.parameters())
    options: dict[str, Any] = {"folder": folder, "block_bytes": 1 << 14, "checked": True}
    return autopar.OffloadedOptimizer(ADAMW.func, model.parameters(), **options, **ADAMW.keywords)


def example(model: nn.Module, case: Case) -> dict[str, Any]:
    """The first batch by the names of the arguments."""
    (args, kwargs) = next(batches(case, [0], ROWS))
    names = list(model.forward.__code__.co_varnames)[1:]
    return {**dict(zip(names, args, strict=False)), **kwargs}


@contextlib.contextmanager
def everything_leaves() -> Iterator[None]:
    """Has values and parameters of any size leave."""
    small = functools.partial(OffloadActivations, least_bytes=1)
    with (
        mock.patch.object(pipeline, "OffloadActivations", small),
        mock.patch.object(parameters, "LEAST_BYTES", 1),
    ):
        yield


@functools.cache
def captures(name: str) -> dict[Any, Any]:
    """Captures of a model in this process: no strategy changes one."""
    return {}
