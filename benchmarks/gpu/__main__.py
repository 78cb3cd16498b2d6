"""Twelve minutes on one GPU: what only CUDA and NCCL can show, part by part.

    python -m benchmarks.gpu --json benchmarks/results/gpu-2026-12-01.json
    python -m benchmarks.gpu --part nccl stopwatch
    python -m benchmarks.gpu --dry-run        # the same code on the CPU: small models, gloo

Each part runs in processes of its own under a time limit, so that none takes the others down. The
file is written after every part and holds the rows of a part that did not end.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.gpu.parts import PARTS, Part
from benchmarks.launch import ROOT, free_port, tail
from benchmarks.report import about, empty_table, save, wide_console

FIGURES = (
    "host_ms",
    "device_ms",
    "predicted_ms",
    "ratio",
    "error",
    "allocated_mib",
    "reserved_mib",
)
DRY = 4.0  # more time for the CPU, whose parts share its cores
ENDING_S = 10.0  # seconds that the other ranks of a part have once one has ended


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--part", nargs="+", choices=[*PARTS], default=[*PARTS], metavar="PART")
    parser.add_argument("--json", type=Path, help="write machine, versions and all rows here")
    parser.add_argument("--dry-run", action="store_true", help="run the same code on the CPU")
    options = parser.parse_args(arguments)
    if not (options.dry_run or torch.cuda.is_available()):
        print("skipped: torch sees no GPU here. --dry-run runs the same code on the CPU.")
        return 0
    console = wide_console()
    document: dict[str, Any] = {**about(), "gpu": gpu(), "dry_run": options.dry_run, "parts": {}}
    for name in options.part:
        result = run_part(PARTS[name], name, options.dry_run)
        document["parts"][name] = result
        show(console, name, PARTS[name], result)
        if options.json:
            save(options.json, document)
    parts = document["parts"].values()
    return int(any(part["ended"] or any(not r["ok"] for r in part["rows"]) for part in parts))


def gpu() -> dict[str, Any] | None:
    """Return name, memory, driver and library versions of the first GPU."""
    if not torch.cuda.is_available():
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        driver = ""
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "count": torch.cuda.device_count(),
        "memory_bytes": properties.total_memory,
        "driver": driver.split("\n")[0].strip() or None,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }


def run_part(part: Part, name: str, dry_run: bool) -> dict[str, Any]:
    """Run the processes of a part to their end or limit; return its rows."""
    start, port = time.monotonic(), free_port()
    with tempfile.TemporaryDirectory(prefix="benchmarks-gpu-") as folder:
        logs = [Path(folder) / f"log.{rank}" for rank in range(part.ranks)]
        rows = Path(folder) / "rows"
        processes = []
        for rank, log in enumerate(logs):
            command = [sys.executable, "-m", "benchmarks.gpu.worker", name, str(rows)]
            command += ["--dry-run"] if dry_run else []
            with log.open("wb") as file:
                processes.append(
                    subprocess.Popen(
                        command,
                        cwd=ROOT,
                        env=environment(rank, part.ranks, port)
                        | ({} if dry_run else part.environment),
                        stdout=file,
                        stderr=subprocess.STDOUT,
                    )
                )
        try:
            ended = wait(processes, logs, start + part.limit_s * (DRY if dry_run else 1))
        finally:
            for process in processes:
                process.kill()
                process.wait()
        lines = rows.read_text().splitlines() if rows.exists() else []
    found = [json.loads(line) for line in lines]
    return {"seconds": round(time.monotonic() - start, 1), "ended": ended, "rows": found}


def environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return torchrun's environment; a part of one process has none."""
    own = {"PYTHONFAULTHANDLER": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    if ranks > 1:
        own |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        own |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    return os.environ | own | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def wait(processes: list[subprocess.Popen[bytes]], logs: list[Path], end: float) -> str:
    """Wait for all processes; return the reason why they did not end well, empty if they did."""
    while time.monotonic() < end:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                return f"rank {rank} ended with {code}: {tail(logs[rank], 30)}"
        if None not in codes:
            return ""
        if 0 in codes:
            end = min(end, time.monotonic() + ENDING_S)
        time.sleep(0.1)
    return f"stopped at its time limit: {tail(logs[0], 30)}"


def show(console: Console, name: str, part: Part, result: dict[str, Any]) -> None:
    """Print the rows of a part, those that failed in red."""
    used = [f for f in FIGURES if any(f in row for row in result["rows"])]
    table = empty_table(f"{name}: {part.question} ({result['seconds']} s)", "case", used)
    table.add_column("remark", overflow="fold")
    for row in result["rows"]:
        figures = [f"{row[f]:.3g}" if row.get(f) is not None else "" for f in used]
        remark = row["remark"] if row["ok"] else f"FAILED: {row['remark']}"
        table.add_row(row["case"], *figures, remark, style="" if row["ok"] else "red")
    console.print(table)
    if result["ended"]:
        console.print(f"{name}: {result['ended']}", style="red", markup=False)


if __name__ == "__main__":
    sys.exit(main())
