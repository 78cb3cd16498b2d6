"""Eight minutes on one GPU, most telling first: what only CUDA and NCCL can show.

    python -m benchmarks.gpu --json benchmarks/results/gpu-2026-12-01.json --page verdict.html
    python -m benchmarks.gpu --part nccl stopwatch --minutes 3
    python -m benchmarks.gpu --json FILE --resume     # what FILE has not yet finished
    python -m benchmarks.gpu --dry-run        # the same code on the CPU: small models, gloo

Each part runs in processes of its own in a time box, so that none takes the others down. The file
is written with every row. It ends with a verdict in words.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.gpu import verdict
from benchmarks.gpu.parts import PARTS, Part
from benchmarks.launch import ROOT, free_port, tail, write_atomically
from benchmarks.report import about, empty_table, wide_console

FIGURES = (
    "host_ms",
    "device_ms",
    "predicted_ms",
    "ratio",
    "error",
    "predicted_mib",
    "allocated_mib",
    "reserved_mib",
)
DRY = 4.0  # more time for the CPU, whose parts share its cores
ENDING_S = 10.0  # seconds that the other ranks of a part have once one has ended
Rows = list[dict[str, Any]]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--part", nargs="+", choices=[*PARTS], default=[*PARTS], metavar="PART")
    parser.add_argument("--json", type=Path, help="write machine, versions and all rows here")
    parser.add_argument("--page", type=Path, help="write tables and verdict here, as HTML")
    parser.add_argument("--minutes", type=float, default=8.0, help="time of all parts; default 8")
    parser.add_argument("--resume", action="store_true", help="keep the parts that ended in FILE")
    parser.add_argument("--dry-run", action="store_true", help="run the same code on the CPU")
    options = parser.parse_args(arguments)
    if not (options.dry_run or torch.cuda.is_available()):
        print("skipped: torch sees no GPU here. --dry-run runs the same code on the CPU.")
        return 0
    console = wide_console()
    console.record = options.page is not None
    document = {**about(), "gpu": gpu(), "dry_run": options.dry_run, "parts": {}}
    if options.resume and options.json and options.json.exists():
        document["parts"] = finished(json.loads(options.json.read_text()), document, console)
    end = time.monotonic() + 60 * options.minutes * (DRY if options.dry_run else 1)
    for name in options.part:
        if name in document["parts"] or time.monotonic() > end:
            continue

        def keep(result: dict[str, Any], name: str = name) -> None:
            document["parts"][name] = result
            if options.json:
                options.json.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(options.json, json.dumps(document, indent=1) + "\n")

        left = end - time.monotonic()
        run_part(PARTS[name], name, options.dry_run, keep, left)
        show(console, name, PARTS[name], document["parts"][name])
    verdict.show(console, document, {name: PARTS[name] for name in options.part})
    if options.page:
        console.save_html(str(options.page))
    parts = document["parts"].values()
    return int(any(part["ended"] or any(not r["ok"] for r in part["rows"]) for part in parts))


def finished(earlier: dict[str, Any], document: dict[str, Any], console: Console) -> dict[str, Any]:
    """Return the parts that an earlier run of the same commit and GPU brought to their end."""
    for what in ("gpu", "dry_run", "versions"):
        if earlier[what] != document[what]:
            console.print(f"--resume: the file is of another {what}; all parts run again")
            return {}
    return {name: part for name, part in earlier["parts"].items() if not part["ended"]}


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


def run_part(
    part: Part,
    name: str,
    dry_run: bool,
    keep: Callable[[dict[str, Any]], None],
    left_s: float = float("inf"),
) -> None:
    """Run the processes of a part to their end or limit; `keep` gets the result with each row."""
    start, port = time.monotonic(), free_port()
    box = min(part.limit_s * (DRY if dry_run else 1), left_s)
    with tempfile.TemporaryDirectory(prefix="benchmarks-gpu-") as folder:
        logs = [Path(folder) / f"log.{rank}" for rank in range(part.ranks)]
        path = Path(folder) / "rows"

        def result(ended: str) -> dict[str, Any]:
            return {
                "seconds": round(time.monotonic() - start, 1),
                "ended": ended,
                "rows": read_rows(path),
            }

        processes = []
        for rank, log in enumerate(logs):
            command = [sys.executable, "-m", "benchmarks.gpu.worker", name, str(path)]
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
        rows = 0
        ended: str | None = None
        try:
            while ended is None:
                ended = state(processes, logs, start + box)
                if ended == "" and any(process.poll() is None for process in processes):
                    box, ended = min(box, time.monotonic() - start + ENDING_S), None
                if len(read_rows(path)) > rows:
                    rows = len(read_rows(path))
                    keep(result("interrupted"))
                time.sleep(0.1)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        keep(result(ended))


def read_rows(path: Path) -> Rows:
    """Return the complete lines of the file of rows."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return torchrun's environment; a part of one process has none."""
    own = {"PYTHONFAULTHANDLER": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    if ranks > 1:
        own |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        own |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    return os.environ | own | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def state(processes: list[subprocess.Popen[bytes]], logs: list[Path], end: float) -> str | None:
    """Return why a part ended: "" once a rank has ended well, None while all run."""
    codes = [process.poll() for process in processes]
    for rank, code in enumerate(codes):
        if code:
            return f"rank {rank} ended with {code}: {tail(logs[rank], 30)}"
    if None in codes and time.monotonic() > end:
        return f"stopped at its time limit: {tail(logs[0], 30)}"
    return "" if 0 in codes else None


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
