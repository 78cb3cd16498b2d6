"""Tables of published runs, by their columns."""

from __future__ import annotations

import csv
from pathlib import Path

from benchmarks.published import fsdp, megatron
from benchmarks.published.run import Run


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


READERS = {
    "ddp_impl": megatron.sc21,
    "seconds_per_step": megatron.bigscience,
    "nodes": megatron.mt_nlg,
    "act_ckpt": fsdp.mpt,
    "node_gbit": fsdp.fms,
    "backend": fsdp.torchtitan,
    "cp": fsdp.torchtitan_long,
    "mfu_pct": megatron.h100,
    "activation_gib": megatron.seqpar,
}
"""Readers by a column that only their table has; the first that fits."""
