"""Tables of published runs, and the configuration in each row."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor, nn

from autopar.core.ir.placement import Shard
from autopar.core.plan.recompute import Level
from autopar.core.plan.strategy import Strategy
from benchmarks.published import llama
from benchmarks.published.gpt import Sizes, make
from examples.plan_llama import SIZES, Size

BUCKET = 64 * 2**20
"""Bucket size in bytes where a table has none; large enough that latency is negligible."""


@dataclass(frozen=True)
class Run:
    name: str  # name of the model, and of the mode where there are several
    cluster: str  # name of a shipped cluster
    gpus: int  # number of GPUs
    sizes: Sizes  # sizes of the model
    rows: int  # rows of the global batch
    strategy: Strategy  # strategy as published
    work: float  # FLOPs of a step by the source's count, or tokens; 0 if it states none
    published: float  # TFLOP/s or tokens/s of a GPU, or GiB of activations on the first stage
    unit: str  # unit of `published`
    assumed: str = ""  # assumptions where the source is silent
    tp_overlap: bool = False  # whether collectives of tp overlap their matrix products in pieces
    scatters: bool = False  # whether ranks of tp each send a part of what goes to the next stage
    backend: str = "ts"  # compiler that fuses small operators: "ts" for Megatron's fused kernels
    device: str = ""  # name of the GPU, if not that of the cluster
    node_gbit: float = 0.0  # network of a node in Gbit/s, if not that of the cluster
    reserved_gib: float = 0.0  # memory that torch reserved on a GPU; 0 if not stated
    llama: Size | None = None  # size of a llama; a GPT of `sizes` otherwise
    half_products: bool = False  # whether every other matrix product is recomputed
    held_bytes: int = 0  # bytes that its program holds at its peak, unlike autopar's
    versions: Mapping[str, str] = field(default_factory=dict)  # software (see `Cluster.versions`)

    def make(self) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
        """Return the model and a global batch, on the meta device."""
        if self.llama is None:
            return make(self.sizes, self.rows)
        return llama.make(self.llama, self.sizes.length, self.rows)


def read(path: Path) -> list[Run]:
    """Return the runs of a table, which is identified by its columns.

    Raises:
        ValueError: the columns are those of no known table.
    """
    with path.open() as lines:
        rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    for column, reader in READERS.items():
        if rows and column in rows[0]:
            return [run for row in rows for run in reader(row)]
    raise ValueError(f"{path}: no known table has these columns: {', '.join(rows[0])}")


SELENE = "NVIDIA A100-SXM4-80GB"


def sc21(row: Mapping[str, str]) -> Iterator[Run]:
    """Table 1 of Narayanan et al. 2021: A100 of 80 GB, full recomputation, included in FLOPs."""
    n = {key: int(row[key]) for key in ("hidden", "layers", "heads", "vocab", "seq", "gbs", "gpus")}
    tp, pp, dp, rows = (int(row[key]) for key in ("tp", "pp", "dp", "mbs"))
    sizes = Sizes(n["hidden"], n["layers"], n["heads"], n["vocab"], n["seq"], tied=pp == 1)
    each = int(row["layers_per_virtual_stage"] or n["layers"] // pp)
    strategy = pipelined(
        sizes, tp, pp, n["layers"] // pp // each, n["gbs"] // (dp * rows), "everything"
    )
    if row["ddp_impl"] == "local":  # all gradients are reduced at once
        strategy = replace(strategy, reduce_bytes=2**62)
    operations = flops(sizes, n["gbs"], recomputed=True)
    published = float(row["tflops_per_gpu"])
    yield Run(
        row["model"], "dgx-a100", n["gpus"], sizes, n["gbs"], strategy, operations, published,
        "TFLOP/s", "dropout of 0.1, Megatron-LM's default", device=SELENE, scatters=True,
    )  # fmt: skip


H100 = {"vocabulary": 131072, "length": 4096}
H100_ROWS = 1  # rows of a micro-batch that fits all runs without recomputation
MOST_LAYERS = 5  # most layers of an interleaved stage in table 1 of SC'21


def h100(row: Mapping[str, str]) -> Iterator[Run]:
    """Megatron-Core's weak scaling: FLOPs without recomputation, sequence parallelism."""
    hidden, layers, heads, gpus = (int(row[k]) for k in ("hidden", "layers", "heads", "gpus"))
    tp, pp, dp, rows = (int(row[key]) for key in ("tp", "pp", "dp", "global_batch"))
    sizes = Sizes(
        hidden, layers, heads, H100["vocabulary"], H100["length"],
        tied=False, flash=True, dropout=False,
    )  # fmt: skip
    local = layers // pp
    each = max(n for n in range(1, MOST_LAYERS + 1) if local % n == 0) if pp > 1 else local
    bucket = 2 * max(40_000_000, 1_000_000 * dp)  # elements, by Megatron-Core's default
    strategy = replace(
        pipelined(sizes, tp, pp, local // each, rows // (dp * H100_ROWS), "none", sequence=True),
        zero=1,  # Megatron's distributed optimizer
        gather_bytes=bucket,
        reduce_bytes=bucket,
    )
    yield Run(
        row["model"], "dgx-h100", gpus, sizes, rows, strategy, flops(sizes, rows, recomputed=False),
        float(row["tflops_per_gpu"]), "TFLOP/s",
        f"micro-batches of {H100_ROWS}, {local // each} stages a rank, nothing recomputed, flash "
        "attention, no dropout, gradients reduced in bfloat16",
        tp_overlap=True,
        scatters=True,
        versions={"attention": "cudnn"},  # Transformer Engine's kernel on Hopper
    )  # fmt: skip


MPT = {
    "125m": (768, 12, 12),
    "350m": (1024, 16, 24),
    "760m": (1536, 12, 24),
    "1b": (2048, 16, 24),
    "3b": (2560, 20, 32),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 56, 48),
    "70b": (8192, 64, 80),
}
"""Hidden size, heads and layers of MPT models (llm-foundry, scripts/train/yamls/pretrain)."""

MPT_VOCABULARY = 50368
MPT_SOFTWARE = {"cuda": "11.8", "attention": "flash-1"}
"""Software of the image and release that llm-foundry's scripts/train/benchmarking/sweep.sh names,
mosaicml/pytorch:2.0.1_cu118 and v0.0.4: FlashAttention 1 and its version in Triton."""


def mpt(row: Mapping[str, str]) -> Iterator[Run]:
    """MPT under FSDP on H100s (llm-foundry): tokens a second of a GPU.

    Composer's mixed precision DEFAULT gathers in bfloat16 and reduces in float32. FSDP wraps every
    block, so that buckets are blocks.
    """
    hidden, heads, layers = MPT[row["model"]]
    length, gpus, rows, micro = (
        int(row[key]) for key in ("seq_len", "gpus", "microbatch", "grad_accum")
    )
    sizes = Sizes(
        hidden, layers, heads, MPT_VOCABULARY, length,
        flash=True, dropout=False, bias=False, mixed=True,
    )  # fmt: skip
    batch, zero = rows * micro * gpus, 3 if row["sharding"] == "FULL_SHARD" else 2
    strategy = Strategy(
        zero=zero,
        recompute="everything" if row["act_ckpt"] == "True" else "none",
        gather_bytes=2 * 12 * hidden**2,
        reduce_bytes=4 * 12 * hidden**2,
        prefetch=1,
        hierarchical=False,
        micro_batches=micro if micro > 1 else None,
    )
    cluster = "dgx-a100" if "a100" in row["gpu"] else "dgx-h100"
    yield Run(
        f"{row['model']} {length} x {gpus}", cluster, gpus, sizes, batch, strategy,
        float(length * batch), float(row["tokens_per_s_per_gpu"]), "tokens/s",
        "learned positions, exact GELU, cross-entropy in float32", backend="eager",
        versions=MPT_SOFTWARE,
    )  # fmt: skip


TITAN_LEVELS: Mapping[str, Level] = {"none": "none", "op": "selective", "full": "everything"}
"""Levels of autopar by torchtitan's name; "op" recomputes every other product, too."""


def products_of(size: Size) -> int:
    """Return the parameters of a block's products."""
    return (
        2 * size.width**2
        + 2 * size.width * size.groups * size.width // size.heads
        + 3 * size.width * size.inner
    )


def sizes_of(size: Size, length: int) -> Sizes:
    """Return the sizes of a llama under FSDP, which casts float32 parameters."""
    return Sizes(
        size.width, size.layers, size.heads, size.vocabulary, length, tied=False, mixed=True
    )


def torchtitan(row: Mapping[str, str]) -> Iterator[Run]:
    """Llama under FSDP2 (torchtitan): tokens a second of a GPU."""
    gpus, rows, length = (int(row[key]) for key in ("gpus", "rows_per_gpu", "length"))
    size = replace(SIZES[row["model"]], vocabulary=int(row["vocabulary"]))
    block = products_of(size)
    tokens, policy = rows * length, row["recompute"] == "op"
    held = 4 * tokens * size.vocabulary  # gradient of the log-probabilities
    if policy and row["backend"] == "eager":  # last products of blocks, which no backward reads
        held += 2 * tokens * size.width * size.layers
    sizes = sizes_of(size, length)
    strategy = Strategy(
        zero=3, recompute=TITAN_LEVELS[row["recompute"]], gather_bytes=2 * block,
        reduce_bytes=4 * block, prefetch=1, hierarchical=False,
    )  # fmt: skip
    yield Run(
        f"{row['model']} {length} x {gpus} {row['recompute']} {row['backend']}",
        "dgx-a100" if "A100" in row["gpu"] else "dgx-h100", gpus, sizes, rows * gpus, strategy,
        float(tokens * gpus), float(row["tokens_per_s_per_gpu"]), "tokens/s",
        "links of a DGX, FlashAttention-2",
        backend=row["backend"], device=row["gpu"], reserved_gib=float(row["reserved_gib"]),
        llama=size, half_products=policy, held_bytes=held,
    )  # fmt: skip


FMS_LENGTH = 4096


def fms(row: Mapping[str, str]) -> Iterator[Run]:
    """Llama 2 under FSDP (fms-fsdp): tokens a second of a GPU.

    HSDP shards over the GPUs of a node. Gradients are reduced in bfloat16.
    """
    gpus, rows, size = int(row["gpus"]), int(row["rows_per_gpu"]), SIZES[row["model"]]
    sizes, nbytes = sizes_of(size, FMS_LENGTH), 2 * products_of(size)
    strategy = Strategy(
        zero=3, recompute=row["recompute"],  # type: ignore[arg-type]
        gather_bytes=nbytes, reduce_bytes=nbytes, prefetch=1,
        hierarchical=False, dp_shard=8 if row["sharding"] == "HSDP" else None,
        reduce_precision="bf16",
    )  # fmt: skip
    yield Run(
        f"{row['model']} x {gpus} {row['gpu'][7:11]} {row['sharding']} {rows} {row['recompute']}",
        "dgx-a100" if "A100" in row["gpu"] else "dgx-h100", gpus, sizes, rows * gpus, strategy,
        float(rows * gpus * FMS_LENGTH), float(row["tokens_per_s_per_gpu"]), "tokens/s",
        "torchtitan's operators, FlashAttention-2", backend="eager", device=row["gpu"],
        node_gbit=float(row["node_gbit"]), llama=size,
    )  # fmt: skip


SEQPAR = {
    "megatron-22B": (6144, 48, 64, 8, 1, 1, 4, 4),
    "gpt3-175B": (12288, 96, 96, 8, 8, 3, 1, 64),
    "turing-530B": (20480, 105, 128, 8, 35, 3, 1, 280),
    "megatron-1T": (25600, 128, 160, 8, 64, 1, 1, 512),
}
"""Hidden size, layers, heads, tp, pp, stages per rank, rows of a micro-batch and of the global
batch (Korthikanti et al. 2022, table 3)."""


def seqpar(row: Mapping[str, str]) -> Iterator[Run]:
    """Figure 1 of Korthikanti et al. 2022: activations with and without sequence parallelism.

    `seqsel` has it and recomputes the core of attention, so that it saves the tensors that flash
    attention saves: queries, keys, values and the result.
    """
    hidden, layers, heads, tp, pp, chunks, rows, batch = SEQPAR[row["model"]]
    selective = row["mode"] == "seqsel"
    sizes = Sizes(hidden, layers, heads, 51200, 2048, tied=pp == 1, flash=selective)
    recompute = "regather" if selective else "none"
    strategy = pipelined(sizes, tp, pp, chunks, batch // rows, recompute, sequence=selective)
    yield Run(
        f"{row['model']} {row['mode']}", "dgx-a100", tp * pp, sizes, batch, strategy, 0.0,
        float(row["activation_gib"]), "GiB of activations",
    )  # fmt: skip


READERS = {
    "ddp_impl": sc21,
    "act_ckpt": mpt,
    "node_gbit": fms,
    "backend": torchtitan,
    "mfu_pct": h100,
    "activation_gib": seqpar,
}


MEGATRON = {
    "token.weight": Shard(0),
    "*.qkv.weight": Shard(0),
    "*.qkv.bias": Shard(0),
    "*.out.weight": Shard(1),
    "*.up.weight": Shard(0),
    "*.up.bias": Shard(0),
    "*.down.weight": Shard(1),
}
"""Placements of Megatron-LM along tp."""


def pipelined(
    sizes: Sizes,
    tp: int,
    pp: int,
    chunks: int,
    micro: int,
    recompute: str,
    *,
    sequence: bool = False,
) -> Strategy:
    """Return a complete strategy: Megatron's placements, and stages of equally many blocks."""
    head = {} if sizes.tied else {"head.weight": Shard(0)}
    stages = pp * chunks
    cuts = tuple(f"blocks.{sizes.layers * stage // stages}" for stage in range(1, stages))
    schedule = ("interleaved" if chunks > 1 else "1f1b") if pp > 1 else None
    return Strategy(
        zero=0,
        recompute=recompute,  # type: ignore[arg-type]
        gather_bytes=BUCKET,
        reduce_bytes=BUCKET,
        prefetch=1,
        hierarchical=False,
        tp=tp,
        placements={**MEGATRON, **head} if tp > 1 else {},
        keep_sharded=True,
        sequence_parallel=sequence,
        pp=pp,
        micro_batches=micro,
        schedule=schedule,  # type: ignore[arg-type]
        stages_per_rank=chunks,
        split_points=cuts if stages > 1 else None,
    )


def flops(sizes: Sizes, rows: int, *, recomputed: bool) -> float:
    """Return the FLOPs of a step by the formula of Narayanan et al. 2021.

    With full recomputation they include a second forward.
    """
    h, length, layers = sizes.hidden, sizes.length, sizes.layers
    one = 24.0 * rows * length * layers * h**2
    attention, head = length / (6 * h), sizes.vocabulary / (16 * layers * h)
    if recomputed:
        return 4 * one * (1 + attention + head)
    return 3 * one * (1 + attention + 4 / 3 * head)
