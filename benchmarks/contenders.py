"""Who competes: each contender turns a case into one whole training step.

A step takes the global batch and returns the loss: of this rank's rows for the peers, of the
global batch for autopar. All use AdamW with the same settings, and nothing else is tuned: each
peer is set up as its own documentation says.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

import autopar
from benchmarks import megatron, pipelining
from benchmarks.before import NAME
from benchmarks.models import Case

Step = Callable[[Tensor, Tensor], Tensor]
Statistics = Literal["global", "local"]
PLAIN = "the plain model"


@dataclass(frozen=True)
class Contender:
    """One way to train.

    Attributes:
        name: what the tables call it.
        build: makes the step; called on every rank at the same time, after seeding.
        peers: what it is compared with: the first of these that ran.
        alone: runs at world size 1 (True), at more (False), at any (None).
        module: the importable module without which it is skipped.
        statistics: which rows BatchNorm normalises over; None where it makes no difference.
        models: those that it can train, or is of interest for; () for all.
        micro_batched: whether it cuts the batch, so that BatchNorm has the rows of each part.
        reference: whose losses it must have.
    """

    name: str
    build: Callable[..., Step]
    peers: tuple[str, ...] = ()
    alone: bool | None = False
    module: str = "torch"
    statistics: Statistics | None = None
    models: tuple[str, ...] = ()
    micro_batched: bool = False
    reference: str = PLAIN

    def absence(self) -> str | None:
        """Return why it cannot run here, or None."""
        installed = importlib.util.find_spec(self.module) is not None
        return None if installed else f"{self.module} is not installed"


def adamw(model: nn.Module, case: Case) -> torch.optim.Optimizer:
    """Return the optimizer that everyone uses."""
    return torch.optim.AdamW(model.parameters(), lr=case.learning_rate)


def my_rows(x: Tensor) -> Tensor:
    """Return this rank's rows of the global batch."""
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def training_step(model: nn.Module, case: Case, *, local: bool) -> Step:
    """Return the four lines that everyone writes, on this rank's rows or on the whole batch."""
    optimizer = adamw(model, case)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = model(my_rows(x), my_rows(y)) if local else model(x, y)
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
    """Return torch's DistributedDataParallel."""
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

    Gradient clipping, on by default, would change the losses; buckets of the default size,
    500 million elements, would be most of the memory of models as small as these.
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
        loss: Tensor = engine(my_rows(x), my_rows(y))
        engine.backward(loss)
        engine.step()
        return loss

    return step


def build_megatron(case: Case, *, sequence: bool) -> Step:
    """Return torch's parallelize_module under a plan written by hand."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = megatron.parallelized(megatron.like(case.build()), mesh, sequence=sequence)
    train = training_step(model, case, local=False)

    def step(x: Tensor, y: Tensor) -> Tensor:
        with loss_parallel():
            loss = train(x, y)
        return loss.full_tensor() if isinstance(loss, DTensor) else loss

    return step


def build_pipelining(case: Case, *, schedule: str) -> Step:
    """Return torch.distributed.pipelining on stages of as many layers each."""
    model, ranks = case.build(), dist.get_world_size()
    stages = ranks * pipelining.STAGES_PER_RANK[schedule]
    parts = pipelining.split(model, case.blocks(model), stages)
    train, mine = pipelining.pipelined(parts, schedule)
    optimizer = adamw(mine, case)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = train(x, y)
        optimizer.step()
        optimizer.zero_grad()
        return loss * ranks  # the losses of all ranks are averaged

    return step


def build_autopar(
    case: Case, *, strategy: str, backend: str, statistics: Statistics | None = None
) -> Step:
    """Return autopar, planned from the first batch."""
    chosen = strategy_of(strategy, case)
    if statistics:
        chosen = replace(chosen, batch_semantics=statistics)
    model = autopar.compile(
        case.build(),
        example_inputs=case.batch(0),
        strategy=chosen,
        backend=backend,
        fallback=False,
    )
    return training_step(model, case, local=False)


def build_before(case: Case, *, strategy: str, statistics: Statistics | None = None) -> Step:
    """Return an earlier commit of autopar, unpacked by `benchmarks.before`."""
    earlier = importlib.import_module(NAME)
    chosen = earlier.Strategy.of(strategy)
    if statistics:
        own = ("batch_semantics", "batch_statistics")  # the second until November 2026
        name = next(field for field in own if hasattr(chosen, field))
        chosen = replace(chosen, **{name: statistics})
    model = earlier.compile(
        case.build(), example_inputs=case.batch(0), strategy=chosen, fallback=False
    )
    return training_step(model, case, local=False)


def strategy_of(name: str, case: Case) -> autopar.Strategy:
    """Return what autopar is told: as much as the peer of that name is set up by hand."""
    ranks = dist.get_world_size()
    if name in pipelining.STAGES_PER_RANK:
        return autopar.Strategy(
            pp=ranks,
            schedule=name,
            micro_batches=pipelining.micro_batches(ranks),
            stages_per_rank=pipelining.STAGES_PER_RANK[name],
        )
    if name == "megatron":
        return autopar.Strategy(tp=ranks, placements=megatron.PINS[case.name])
    axis = {"tp": "tp", "pipeline": "pp"}.get(name)
    return autopar.Strategy(**{axis: ranks}) if axis else autopar.Strategy.of(name)


def _autopar(
    strategy: str,
    *peers: str,
    backend: str = "eager",
    alone: bool | None = False,
    models: tuple[str, ...] = (),
) -> Contender:
    name = f"autopar-{strategy}" + ("" if backend == "eager" else f"+{backend}")
    build = partial(build_autopar, strategy=strategy, backend=backend)
    return Contender(name, build, peers, alone, module="autopar", models=models)


def _before(strategy: str) -> Contender:
    build = partial(build_before, strategy=strategy)
    return Contender(f"before-{strategy}", build, ("ddp",), module=NAME)


def _deepspeed(stage: int) -> Contender:
    build = partial(build_deepspeed, stage=stage)
    return Contender(f"deepspeed-{stage}", build, ("ddp",), module="deepspeed")


def _megatron(name: str, *peers: str, sequence: bool) -> Contender:
    build = partial(build_megatron, sequence=sequence)
    return Contender(name, build, peers, models=TRANSFORMERS)


def _pipelines(schedule: str) -> tuple[Contender, Contender]:
    """Torch's stages under a schedule, and autopar's."""
    models = DEEP if pipelining.STAGES_PER_RANK[schedule] > 1 else PIPELINED
    build = partial(build_pipelining, schedule=schedule)
    torchs = Contender(f"pipelining-{schedule}", build, models=models, micro_batched=True)
    autopars = _autopar(schedule, torchs.name, models=models)
    return torchs, replace(autopars, micro_batched=True)


TRANSFORMERS = ("gpt", "encoder")
DEEP = ("deep", "vocabulary", "conv")  # with layers for two stages on each of 4 ranks
PIPELINED = (*TRANSFORMERS, *DEEP)
EXACT = ("gpt", "encoder", "deep", "vocabulary")  # however many micro-batches there are

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
    _before("ddp"),
    _before("zero3"),
    _autopar("auto", "ddp", "plain", alone=None),
    _autopar("ddp", "ddp+compile", "torch.compile", backend="inductor", alone=None),
    _autopar("zero3", "fully_shard+compile", backend="inductor"),
    _megatron("megatron", "ddp", sequence=False),
    _megatron("megatron+sequence", "megatron", sequence=True),
    _autopar("tp", "megatron", models=TRANSFORMERS),
    _autopar("megatron", "megatron", models=TRANSFORMERS),
    *(contender for schedule in pipelining.STAGES_PER_RANK for contender in _pipelines(schedule)),
    _autopar("pipeline", "pipelining-1f1b", "pipelining-gpipe", models=EXACT),
)


def field(case: Case, world_size: int, names: Collection[str] = ()) -> list[Contender]:
    """Return those that compete for a case at a world size; `names`, if any, narrow them down.

    Where batch statistics make a difference, the peers have local ones, and autopar enters twice.
    """
    chosen = [c for c in CONTENDERS if c.alone in (None, world_size == 1)]
    chosen = [c for c in chosen if not c.models or case.name in c.models]
    chosen = [c for c in chosen if not names or c.name in names]
    if not case.batch_statistics or world_size == 1:
        return chosen
    return [variant for contender in chosen for variant in _variants(contender)]


def _variants(contender: Contender) -> list[Contender]:
    """With the statistics that it can have, and whose losses it has then.

    Statistics of all rows are not known while some of them have yet to pass the pipeline.
    """
    local = "pipelining-gpipe" if contender.micro_batched else "ddp"
    if contender.module not in ("autopar", NAME):
        return [replace(contender, statistics="local", reference=local)]
    references: dict[Statistics, str] = {"global": PLAIN, "local": local}
    if contender.micro_batched:
        del references["global"]
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
