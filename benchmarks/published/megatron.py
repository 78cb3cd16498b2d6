"""Published runs of Megatron-LM, its successors and Megatron-DeepSpeed, by table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from autopar.core.ir.placement import Shard
from autopar.core.plan.strategy import Strategy
from benchmarks.published.gpt import Sizes
from benchmarks.published.run import Run

BUCKET = 64 * 2**20
"""Bucket size in bytes where a table has none; large enough that latency is negligible."""

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


def h100(row: Mapping[str, str]) -> Iterator[Run]:
    """Megatron-Core's weak scaling: FLOPs without recomputation, sequence parallelism."""
    hidden, layers, heads, gpus = (int(row[k]) for k in ("hidden", "layers", "heads", "gpus"))
    tp, pp, dp, rows = (int(row[key]) for key in ("tp", "pp", "dp", "global_batch"))
    sizes = Sizes(
        hidden, layers, heads, H100["vocabulary"], H100["length"],
        tied=False, flash=True, dropout=False,
    )  # fmt: skip
    bucket = 2 * max(40_000_000, 1_000_000 * dp)  # elements, by Megatron-Core's default
    strategy = replace(
        pipelined(sizes, tp, pp, 1, rows // (dp * H100_ROWS), "none", sequence=True),
        zero=1,  # Megatron's distributed optimizer
        gather_bytes=bucket,
        reduce_bytes=bucket,
    )
    yield Run(
        row["model"], "dgx-h100", gpus, sizes, rows, strategy, flops(sizes, rows, recomputed=False),
        float(row["tflops_per_gpu"]), "TFLOP/s",
        f"micro-batches of {H100_ROWS}, one stage a rank, nothing recomputed, flash attention, "
        "no dropout, gradients reduced in bfloat16",
        tp_overlap=True,
        scatters=True,
        versions={"attention": "cudnn"},  # Transformer Engine's kernel on Hopper
    )  # fmt: skip


BLOOM_VOCABULARY = 250880  # 250k entries, padded to what tp divides
JEAN_ZAY_GBIT = 400.0
"""Network of a node: four links of Omni-Path 100 (bigscience's model card of BLOOM)."""


def bigscience(row: Mapping[str, str]) -> Iterator[Run]:
    """Megatron-DeepSpeed's trials for BLOOM: seconds of a step, as TFLOP/s with recomputation.

    Where pp does not divide the blocks, embedding and head count as a block each.
    """
    n = {key: int(row[key]) for key in ("hidden", "layers", "heads", "tp", "pp", "dp", "gbs")}
    rows, gpus = int(row["mbs"]), n["tp"] * n["pp"] * n["dp"]
    sizes = Sizes(n["hidden"], n["layers"], n["heads"], BLOOM_VOCABULARY, 2048, tied=False)
    strategy = deepspeed(sizes, n["tp"], n["pp"], n["gbs"] // (n["dp"] * rows))
    if n["layers"] % n["pp"]:
        each = (n["layers"] + 2) // n["pp"]
        cuts = tuple(f"blocks.{each * stage - 1}" for stage in range(1, n["pp"]))
        strategy = replace(strategy, split_points=cuts)
    operations = flops(sizes, n["gbs"], recomputed=True)
    yield Run(
        f"{n['hidden']}x{n['layers']} heads {n['heads']} tp {n['tp']} pp {n['pp']} dp {n['dp']} "
        f"mbs {rows} {row['precision']} {row['date']}",
        "dgx-a100", gpus, sizes, n["gbs"], strategy, operations,
        operations / float(row["seconds_per_step"]) / gpus / 1e12, "TFLOP/s",
        "dropout of 0.1, head and embedding untied", device=SELENE,
        node_gbit=JEAN_ZAY_GBIT, scatters=True, awaits=True,
    )  # fmt: skip


def mt_nlg(row: Mapping[str, str]) -> Iterator[Run]:
    """Megatron-Turing NLG 530B: seconds of a step, as TFLOP/s with recomputation."""
    nodes, dp, rows = (int(row[key]) for key in ("nodes", "dp", "gbs"))
    sizes = Sizes(20480, 105, 128, 51200, 2048, tied=False)
    operations = flops(sizes, rows, recomputed=True)
    yield Run(
        f"530B x {8 * nodes}", "dgx-a100", 8 * nodes, sizes, rows,
        deepspeed(sizes, 8, 35, rows // dp), operations,
        operations / float(row["seconds"]) / (8 * nodes) / 1e12, "TFLOP/s",
        "dropout of 0.1, head and embedding untied", device=SELENE, scatters=True, awaits=True,
    )  # fmt: skip


def deepspeed(sizes: Sizes, tp: int, pp: int, micro: int) -> Strategy:
    """Return the strategy of Megatron-DeepSpeed: ZeRO 1, all gradients reduced at once."""
    strategy = pipelined(sizes, tp, pp, 1, micro, "everything")
    return replace(strategy, zero=1, reduce_bytes=2**62)


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
