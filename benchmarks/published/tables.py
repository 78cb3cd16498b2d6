"""The tables of published runs, and what of a run's configuration each row says."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from autopar.ir.placement import Shard
from autopar.plan.strategy import Strategy
from benchmarks.published.gpt import Form

BUCKET = 64 * 2**20
"""Bytes that gradients are summed in where a table does not say: so that none are latency."""


@dataclass(frozen=True)
class Run:
    """One published run.

    Attributes:
        name: of the model, and of the mode where there are several.
        cluster: a shipped one.
        gpus: how many were used.
        form: of the model.
        rows: of the global batch.
        strategy: as published.
        flops: floating-point operations of a step, as the source counts them; 0 if it states none.
        published: TFLOP/s of a GPU by the source's count, or GiB of activations on the first stage.
        unit: of `published`.
        assumed: what the source does not say.
        behind_products: whether what tp sends travels behind the products that it is for.
    """

    name: str
    cluster: str
    gpus: int
    form: Form
    rows: int
    strategy: Strategy
    flops: float
    published: float
    unit: str
    assumed: str = ""
    behind_products: bool = False


def read(path: Path) -> list[Run]:
    """The runs of a table; which one it is its columns tell.

    Raises:
        ValueError: it has the columns of no known table.
    """
    with path.open() as lines:
        rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    for column, reader in READERS.items():
        if rows and column in rows[0]:
            return [run for row in rows for run in reader(row)]
    raise ValueError(f"{path}: no known table has these columns: {', '.join(rows[0])}")


def sc21(row: Mapping[str, str]) -> Iterator[Run]:
    """Table 1 of Narayanan et al. 2021: A100 of 80 GB, everything recomputed, FLOPs with that."""
    n = {key: int(row[key]) for key in ("hidden", "layers", "heads", "vocab", "seq", "gbs", "gpus")}
    tp, pp, dp, rows = (int(row[key]) for key in ("tp", "pp", "dp", "mbs"))
    form = Form(n["hidden"], n["layers"], n["heads"], n["vocab"], n["seq"], tied=pp == 1)
    each = int(row["layers_per_virtual_stage"] or n["layers"] // pp)
    strategy = pipelined(
        form, tp, pp, n["layers"] // pp // each, n["gbs"] // (dp * rows), "everything"
    )
    if row["ddp_impl"] == "local":  # gradients are summed at once, when all of them are there
        strategy = replace(strategy, reduce_bytes=2**62)
    operations = flops(form, n["gbs"], recomputed=True)
    published = float(row["tflops_per_gpu"])
    yield Run(
        row["model"], "dgx-a100", n["gpus"], form, n["gbs"], strategy, operations, published,
        "TFLOP/s", "dropout of 0.1, Megatron-LM's default",
    )  # fmt: skip


H100 = {"vocabulary": 131072, "length": 4096}
H100_ROWS = 1
"""Rows of a micro-batch: what fits all of them without recomputation."""


MOST_LAYERS = 5
"""Of a stage where several are a rank's: the most of table 1 of SC'21."""


def h100(row: Mapping[str, str]) -> Iterator[Run]:
    """Megatron-Core's weak scaling: nothing recomputed in the count; sequences are divided."""
    hidden, layers, heads, gpus = (int(row[k]) for k in ("hidden", "layers", "heads", "gpus"))
    tp, pp, dp, rows = (int(row[key]) for key in ("tp", "pp", "dp", "global_batch"))
    form = Form(
        hidden, layers, heads, H100["vocabulary"], H100["length"],
        tied=False, flash=True, dropped=False,
    )  # fmt: skip
    own = layers // pp
    each = max(n for n in range(1, MOST_LAYERS + 1) if own % n == 0) if pp > 1 else own
    bucket = 2 * max(40_000_000, 1_000_000 * dp)  # elements, by Megatron-Core's default
    strategy = replace(
        pipelined(form, tp, pp, own // each, rows // (dp * H100_ROWS), "none", sequence=True),
        zero=1,  # Megatron's distributed optimizer
        gather_bytes=bucket,
        reduce_bytes=bucket,
    )
    yield Run(
        row["model"], "dgx-h100", gpus, form, rows, strategy, flops(form, rows, recomputed=False),
        float(row["tflops_per_gpu"]), "TFLOP/s",
        f"micro-batches of {H100_ROWS}, {own // each} stages a rank, nothing recomputed, flash "
        "attention, no dropout, gradients reduced in bfloat16",
        behind_products=True,
    )  # fmt: skip


SEQPAR = {
    "megatron-22B": (6144, 48, 64, 8, 1, 1, 4, 4),
    "gpt3-175B": (12288, 96, 96, 8, 8, 3, 1, 64),
    "turing-530B": (20480, 105, 128, 8, 35, 3, 1, 280),
    "megatron-1T": (25600, 128, 160, 8, 64, 1, 1, 512),
}
"""Hidden, layers, heads, tp, pp, stages a rank, rows of a micro-batch and of the global batch:
Korthikanti et al. 2022, table 3."""


def seqpar(row: Mapping[str, str]) -> Iterator[Run]:
    """Figure 1 of Korthikanti et al. 2022: activations with and without sequence parallelism.

    `seqsel` has that and computes the core of attention again, which keeps what flash attention
    does: queries, keys, values and the result.
    """
    hidden, layers, heads, tp, pp, chunks, rows, batch = SEQPAR[row["model"]]
    selective = row["mode"] == "seqsel"
    form = Form(hidden, layers, heads, 51200, 2048, tied=pp == 1, flash=selective)
    recompute = "regather" if selective else "none"
    strategy = pipelined(form, tp, pp, chunks, batch // rows, recompute, sequence=selective)
    yield Run(
        f"{row['model']} {row['mode']}", "dgx-a100", tp * pp, form, batch, strategy, 0.0,
        float(row["activation_gib"]), "GiB of activations",
    )  # fmt: skip


READERS = {"ddp_impl": sc21, "mfu_pct": h100, "activation_gib": seqpar}


MEGATRON = {
    "token.weight": Shard(0),
    "*.qkv.weight": Shard(0),
    "*.qkv.bias": Shard(0),
    "*.out.weight": Shard(1),
    "*.up.weight": Shard(0),
    "*.up.bias": Shard(0),
    "*.down.weight": Shard(1),
}
"""How Megatron-LM lays parameters over tp."""


def pipelined(
    form: Form,
    tp: int,
    pp: int,
    chunks: int,
    micro: int,
    recompute: str,
    *,
    sequence: bool = False,
) -> Strategy:
    """A strategy with nothing left open: Megatron's placements, stages of equally many blocks."""
    head = {} if form.tied else {"head.weight": Shard(0)}
    stages = pp * chunks
    cuts = tuple(f"blocks.{form.layers * stage // stages}" for stage in range(1, stages))
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


def flops(form: Form, rows: int, *, recomputed: bool) -> float:
    """Of a step, by the formula of Narayanan et al. 2021 (with a second forward, if recomputed)."""
    h, length, layers = form.hidden, form.length, form.layers
    one = 24.0 * rows * length * layers * h**2
    attention, head = length / (6 * h), form.vocabulary / (16 * layers * h)
    if recomputed:
        return 4 * one * (1 + attention + head)
    return 3 * one * (1 + attention + 4 / 3 * head)
