"""Predictions of the cost model beside measurements.

python -m benchmarks.prediction --part curves --json FILE
python -m benchmarks.prediction --part memory --quick
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from rich.console import Console

from autopar.errors import AutoparError
from benchmarks.prediction.report import PARTS, details, overview
from benchmarks.report import about, save, wide_console

TABLES = Path(__file__).resolve().parents[3] / "shared" / "data" / "nccl_tests"


def main() -> int:
    """Run the parts and show their tables; the exit status is 1 if one could not run."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.prediction",
        description="Compare predictions with measurements made elsewhere or here.",
    )
    parser.add_argument("--part", choices=PARTS, action="append", help="only this one; repeatable")
    parser.add_argument(
        "--tables",
        type=Path,
        default=TABLES,
        metavar="DIR",
        help="nccl-tests tables (CSV, text or JSON) for the part curves",
    )
    parser.add_argument("--quick", action="store_true", help="fewer and shorter measurements")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    args, console = parser.parse_args(), wide_console()
    outcomes: dict[str, dict[str, Any]] = {}
    for name in args.part or PARTS:
        outcomes[name] = run_part(name, args, console)
        if "error" in outcomes[name]:
            console.print(outcomes[name]["error"], style="red", markup=False, soft_wrap=True)
        for drawn in details(name, outcomes[name]):
            console.print(drawn)
        if args.json:
            save(args.json, {**about(), "parts": outcomes})
    console.print(overview(outcomes))
    return int(any("error" in outcome for outcome in outcomes.values()))


def run_part(name: str, args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Run one part; its exception becomes `error`, so that the other parts still run."""
    console.print(f"[bold]{name}[/]")
    start = time.perf_counter()
    try:
        outcome = importlib.import_module(f"benchmarks.prediction.{name}").run(args)
    except (AutoparError, OSError) as error:
        outcome = {"error": str(error)}
    except Exception as error:
        traceback.print_exc()
        outcome = {"error": f"{type(error).__name__}: {error}"}
    return {**outcome, "seconds": round(time.perf_counter() - start, 1)}


if __name__ == "__main__":
    sys.exit(main())
