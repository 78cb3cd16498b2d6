"""Contenders: each turns a case into one whole training step.

A step takes the global batch and returns the loss: of this rank's rows for the peers, of the
global batch for autopar. Each peer is set up as its own documentation says, with the same AdamW.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import autopar
from benchmarks.before import NAME
from benchmarks.models import Case, Logits, token_loss

Step = Callable[[Tensor, Tensor], Tensor]
Statistics = Literal["global", "local"]
PLAIN = "the plain model"


@dataclass(frozen=True)
class Contender:
    name: str
    build: Callable[..., Step]  # called on every rank at the same time, after seeding
    peers: tuple[str, ...] = ()  # contenders to compare with; the first that ran counts
    alone: bool | None = False  # runs at world size 1 (True), at more (False), or at any (None)
    module: str = "torch"  # module without which it is skipped
    statistics: Statistics | None = None  # rows that BatchNorm normalises over, where it matters
    reference: str = PLAIN  # contender with the same losses
    only_named: bool = False  # whether it runs on request alone

    def absence(self) -> str | None:
        installed = importlib.util.find_spec(self.module) is not None
        return None if installed else f"{self.module} is not installed"


def adamw(model: nn.Module, case: Case) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=case.learning_rate)


def local_rows(x: Tensor) -> Tensor:
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def training_step(
    model: nn.Module, case: Case, *, local: bool, loss_of: Step | None = None
) -> Step:
    """Return the usual four lines of training, on this rank's rows or on the whole batch.

    The loss is `loss_of` the batch, by default what the model returns.
    """
    optimizer, compute = adamw(model, case), loss_of or model

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = compute(local_rows(x), local_rows(y)) if local else compute(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def build_plain(case: Case, *, compiled: bool = False) -> Step:
    """Return the model on one process, on the whole batch."""
    model = case.build()
    return training_step(torch.compile(model) if compiled else model, case, local=False)


def build_ddp(case: Case, *, compiled: bool = False) -> Step:
    model = DistributedDataParallel(case.build())
    return training_step(torch.compile(model) if compiled else model, case, local=True)


def build_fully_shard(case: Case, *, compiled: bool = False) -> Step:
    """Return torch's FSDP2: blocks and root wrapped, resharded after the forward by default."""
    model = case.build()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in case.blocks(model):
        if compiled:
            block.compile()
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return training_step(model, case, local=True)


def build_deepspeed(case: Case, *, stage: int) -> Step:
    """Return a DeepSpeed engine.

    Gradient clipping, on by default, would change the losses. Buckets of the default size, 500
    million elements, would be most of the memory of models as small as these.
    """
    import deepspeed

    model = case.build()
    rows = case.batch(0)[0].shape[0]
    config = {
        "train_batch_size": rows,
        "train_micro_batch_size_per_gpu": rows // dist.get_world_size(),
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1 << 20},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model, case), config=config)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = engine(local_rows(x), local_rows(y))
        engine.backward(loss)
        engine.step()
        return loss

    return step


@dataclass(frozen=True)
class PlannedStep:
    """A training step of autopar with its plan."""

    step: Step | None  # the step; None once it is released
    plan: autopar.Plan  # the plan with its prediction
    seconds: float  # time of capturing, measuring, planning and emitting

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        assert self.step is not None
        return self.step(x, y)


def build_planned(case: Case, **options: Any) -> PlannedStep:
    """Return autopar with its plan; `options` are those of `autopar.compile`."""
    start = time.perf_counter()
    model = autopar.compile(case.build(), example_inputs=case.batch(0), fallback=False, **options)
    seconds = time.perf_counter() - start
    assert model.plan is not None
    return PlannedStep(training_step(model, case, local=False), model.plan, seconds)


def build_autopar(
    case: Case,
    *,
    strategy: str,
    package: str = "autopar",
    backend: str = "eager",
    statistics: Statistics | None = None,
    loss_chunks: int | None = None,
) -> Step:
    """Return autopar, or an earlier commit of it unpacked by `benchmarks.before`."""
    library = importlib.import_module(package)
    chosen = library.Strategy.of(strategy)
    if loss_chunks:
        chosen = replace(chosen, loss_chunks=loss_chunks)
    if statistics:
        chosen = replace(chosen, batch_semantics=statistics)
    options = {"example_inputs": case.batch(0), "strategy": chosen, "backend": backend}
    model = library.compile(case.build(), **options, fallback=False)
    return training_step(model, case, local=False)


def build_loss_in_loop(case: Case, *, given: bool) -> Step:
    """Return autopar on a GPT that returns its logits.

    The loop computes the loss of the gathered logits, unless autopar is `given` it as `loss_fn`.
    """
    loss_fn = token_loss if given else None
    x, y = case.batch(0)
    example = (x, y) if given else (x,)
    model = autopar.compile(
        Logits(case.build()),
        example_inputs=example,
        strategy="ddp",
        loss_fn=loss_fn,
        fallback=False,
    )
    in_loop = None if given else (lambda x, y: token_loss(model(x), y))
    return training_step(model, case, local=False, loss_of=in_loop)


def _autopar(
    strategy: str, *peers: str, backend: str = "eager", alone: bool | None = False
) -> Contender:
    name = f"autopar-{strategy}" + ("" if backend == "eager" else f"+{backend}")
    build = partial(build_autopar, strategy=strategy, backend=backend)
    return Contender(name, build, peers, alone, module="autopar")


def _before(strategy: str) -> Contender:
    build = partial(build_autopar, strategy=strategy, package=NAME)
    return Contender(f"before-{strategy}", build, ("ddp",), module=NAME)


def _loss(name: str, *, given: bool) -> Contender:
    build = partial(build_loss_in_loop, given=given)
    return Contender(name, build, ("autopar-ddp",), module="autopar", only_named=True)


def _chunks(strategy: str) -> Contender:
    build = partial(build_autopar, strategy=strategy, loss_chunks=8)
    name, peers = f"autopar-{strategy}/8-chunks", (f"autopar-{strategy}",)
    return Contender(name, build, peers, module="autopar", only_named=True)


def _deepspeed(stage: int) -> Contender:
    build = partial(build_deepspeed, stage=stage)
    return Contender(f"deepspeed-{stage}", build, ("ddp",), module="deepspeed")


CONTENDERS = (
    Contender("plain", build_plain, alone=True),
    Contender("torch.compile", partial(build_plain, compiled=True), ("plain",), alone=True),
    Contender("ddp", build_ddp),
    Contender("ddp+compile", partial(build_ddp, compiled=True), ("ddp",)),
    Contender("fully_shard", build_fully_shard, ("ddp",)),
    Contender("fully_shard+compile", partial(build_fully_shard, compiled=True), ("fully_shard",)),
    *(_deepspeed(stage) for stage in range(4)),
    _autopar("ddp", "before-ddp", "ddp", "plain", alone=None),
    _autopar("zero1", "deepspeed-1", "ddp"),
    _autopar("zero2", "deepspeed-2", "fully_shard"),
    _autopar("zero3", "before-zero3", "fully_shard"),
    _loss("autopar-ddp/loss_fn", given=True),
    _loss("autopar-ddp/loss-in-loop", given=False),
    _chunks("ddp"),
    _chunks("zero3"),
    _before("ddp"),
    _before("zero3"),
    _autopar("auto", "ddp", "plain", alone=None),
    _autopar("ddp", "ddp+compile", "torch.compile", backend="inductor", alone=None),
    _autopar("zero3", "fully_shard+compile", backend="inductor"),
)


def field(case: Case, world_size: int, names: Collection[str] = ()) -> list[Contender]:
    """Return the contenders for a case at a world size, only those in `names` if any.

    Where batch statistics make a difference, the peers have local ones, and autopar runs twice.
    """
    chosen = [c for c in CONTENDERS if c.alone in (None, world_size == 1)]
    chosen = [c for c in chosen if not names or c.name in names]
    if not case.batch_statistics or world_size == 1:
        return chosen
    return [variant for contender in chosen for variant in _variants(contender)]


def _variants(contender: Contender) -> list[Contender]:
    """The contender with each kind of batch statistics, and the reference for its losses."""
    if contender.module not in ("autopar", NAME):
        return [replace(contender, statistics="local", reference="ddp")]
    references: dict[Statistics, str] = {"global": PLAIN, "local": "ddp"}
    return [
        replace(
            contender,
            name=f"{contender.name}/{statistics}-statistics",
            build=partial(contender.build, statistics=statistics),
            statistics=statistics,
            reference=reference,
            peers=tuple(
                name
                for peer in contender.peers
                for name in (f"{peer}/{statistics}-statistics", peer)
            ),
        )
        for statistics, reference in references.items()
    ]
