"""Predictions of the cost model beside what was measured.

python -m benchmarks.prediction --part curves --json FILE
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from rich.console import Console

from autopar.errors import AutoparError
from benchmarks.prediction.report import PARTS, details, document, overview

GIVEN = Path(__file__).resolve().parents[3] / "shared" / "data" / "nccl_tests"


def parse_arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.prediction",
        description="Predict what was measured elsewhere, or is measured here, and compare.",
    )
    parser.add_argument("--part", choices=PARTS, action="append", help="only this one; repeatable")
    parser.add_argument(
        "--tables",
        type=Path,
        default=GIVEN,
        metavar="DIR",
        help="nccl-tests tables (CSV, text or JSON) for the part curves",
    )
    parser.add_argument("--quick", action="store_true", help="fewer and shorter measurements")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    return parser.parse_args()


def run_part(name: str, args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Run one part; what keeps it from running is its `error`."""
    module = f"benchmarks.prediction.{name}"
    console.print(f"[bold]{name}[/]")
    start = time.perf_counter()
    try:
        outcome: dict[str, Any] = importlib.import_module(module).run(args)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        outcome = {"error": f"there is no {module}"}
    except (AutoparError, OSError) as error:
        outcome = {"error": str(error)}
    except Exception as error:  # the other parts are worth having
        traceback.print_exc()
        outcome = {"error": f"{type(error).__name__}: {error}"}
    return {**outcome, "seconds": round(time.perf_counter() - start, 1)}


def main() -> int:
    """Run the parts, show their tables; the exit status is 1 if one could not run."""
    args = parse_arguments()
    console = Console()
    outcomes: dict[str, dict[str, Any]] = {}
    for name in args.part or PARTS:
        outcomes[name] = run_part(name, args, console)
        if "error" in outcomes[name]:
            console.print(outcomes[name]["error"], style="red", markup=False, soft_wrap=True)
        for drawn in details(name, outcomes[name]):
            console.print(drawn)
        if args.json:  # after every part: a later one may take long
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(document(outcomes), indent=1) + "\n")
    console.print(overview(outcomes))
    return 1 if any("error" in outcome for outcome in outcomes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
