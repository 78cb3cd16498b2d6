"""Memory of a rank while a model starts, beside its share of the parameters.

    python -m benchmarks.starting --json FILE

`values`: a llama of 32 billion parameters on the meta device, over 8 fake ranks under ZeRO 3.
Rank 0 initialises every block; fake tensors count in full. `load`: a smaller llama that 2 processes
read from a sharded safetensors checkpoint. Its tensors must be the plain model's.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.report import about, empty_table, save, wide_console
from benchmarks.starting import load, values

MIB = 2**20
PARTS = {"load": load.run, "values": values.run}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.starting", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--part", nargs="+", choices=[*PARTS], default=[*PARTS])
    options = parser.parse_args(arguments)
    rows = {name: row for part in options.part for name, row in PARTS[part]().items()}
    columns = ("whole", "share", "block", "peak", "beyond share", "most_open", "same", "tensors")
    table = empty_table("MiB of a rank while a model starts", "start", columns)
    ok = True
    for name, row in rows.items():
        row["beyond share"] = row["peak"] - row["share"]
        ok &= row["beyond share"] <= row["block"] + MIB and row.get("same") == row.get("tensors")
        in_mib = [
            f"{row[c] / MIB:,.1f}" if c in columns[:5] else f"{row.get(c, '')}" for c in columns
        ]
        table.add_row(name, *in_mib)
    wide_console().print(table)
    if options.json:
        save(options.json, {**about(), "rows": rows})
    return int(not ok)


if __name__ == "__main__":
    sys.exit(main())
