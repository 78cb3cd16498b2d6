"""Published runs of FSDP, by table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from autopar.core.plan.recompute import Level
from autopar.core.plan.strategy import Strategy
from benchmarks.published.gpt import Sizes
from benchmarks.published.run import Run
from examples.plan_llama import SIZES, Size

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
MPT_SOFTWARE = {"cuda": "11.8", "attention": "flash-1-triton"}
"""Software of the image and release that llm-foundry's scripts/train/benchmarking/sweep.sh names,
mosaicml/pytorch:2.0.1_cu118 and v0.0.4; submit_benchmarks.py there has attn_impl "triton"."""

MPT_DEVICES = {
    "h100_80gb": "NVIDIA H100 80GB HBM3",
    "a100_80gb": "NVIDIA A100-SXM4-80GB",
    "a100_40gb": "NVIDIA A100-SXM4-40GB",
}


def mpt(row: Mapping[str, str]) -> Iterator[Run]:
    """MPT under FSDP (llm-foundry): tokens a second of a GPU.

    Composer's mixed precision gathers in bfloat16; DEFAULT reduces in float32, PURE in bfloat16.
    FSDP wraps every block, so that buckets are blocks.
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
    pure, device = row.get("mp_mode") == "PURE", MPT_DEVICES[row["gpu"]]
    strategy = Strategy(
        zero=zero,
        recompute="everything" if row["act_ckpt"] == "True" else "none",
        gather_bytes=2 * 12 * hidden**2,
        reduce_bytes=(2 if pure else 4) * 12 * hidden**2,
        prefetch=1,
        hierarchical=False,
        micro_batches=micro if micro > 1 else None,
        reduce_precision="bf16" if pure else None,
    )
    cluster = "dgx-a100" if "A100" in device else "dgx-h100"
    name = f"{row['model']} {length} x {gpus}" + " 40GB" * ("40GB" in device)
    yield Run(
        name, cluster, gpus, sizes, batch, strategy,
        float(length * batch), float(row["tokens_per_s_per_gpu"]), "tokens/s",
        "learned positions, exact GELU, cross-entropy in float32", backend="eager",
        device=device, versions=MPT_SOFTWARE,
    )  # fmt: skip


FLASH_2 = {"attention": "flash-2"}
"""Kernel that torch before 2.11 chose on all of these GPUs by itself."""

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
        llama=size, half_products=policy, held_bytes=held, versions=FLASH_2,
    )  # fmt: skip


def torchtitan_long(row: Mapping[str, str]) -> Iterator[Run]:
    """Llama 3.1 under FSDP2 with rows divided along cp, and float8 products (torchtitan).

    Keys and values go round in a ring, and ranks have the first and the last parts of rows, so
    that all have as much of the causal half.
    """
    gpus, cp, length = (int(row[key]) for key in ("gpus", "cp", "length"))
    size = replace(SIZES[row["model"]], vocabulary=int(row["vocabulary"]))
    rows, block = gpus // cp, products_of(size)
    strategy = Strategy(
        zero=3, recompute="everything", gather_bytes=2 * block, reduce_bytes=4 * block,
        prefetch=1, hierarchical=False, cp=cp, ring_attention=True if cp > 1 else None,
    )  # fmt: skip
    yield Run(
        f"{row['model']} {length} x {gpus} cp {cp}", "dgx-h100", gpus, sizes_of(size, length),
        rows, strategy, float(rows * length), float(row["tokens_per_s_per_gpu"]), "tokens/s",
        "links of a DGX, FlashAttention-2", backend="inductor", device=row["gpu"],
        reserved_gib=float(row["reserved_gib"]), llama=size, float8=True, versions=FLASH_2,
        held_bytes=4 * length // cp * size.vocabulary,  # gradient of the log-probabilities
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
        node_gbit=float(row["node_gbit"]), llama=size, versions=FLASH_2,
    )  # fmt: skip
