"""Offload to storage: its exactness, its memory, and the seconds of a step.

python -m benchmarks.offload FOLDER              # a step in memory, on storage, and with hooks
python -m benchmarks.offload FOLDER --states     # an optimizer's step, beside DeepSpeed's
python -m benchmarks.offload FOLDER --exactness  # models x plans x offloaded contents
python -m benchmarks.offload FOLDER --fits       # under a limit of the process's memory
python -m benchmarks.offload FOLDER --largest    # the largest model under such a limit
python -m benchmarks.offload FOLDER --regret     # the planner's choice beside all combinations
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.offload import regret, states
from benchmarks.offload.exactness import CONTENTS, NAMES, PLANS, sweep
from benchmarks.offload.fits import fits, largest
from benchmarks.offload.steps import compare
from benchmarks.report import about, save


def main() -> int:
    """Prints and writes what was asked for; 1 if anything is not as promised."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter

    def some(known: Any) -> Any:
        return {"type": lambda text: text.split(","), "default": list(known), "metavar": "A,B"}

    parser.add_argument("folder", type=Path, help="folder on the storage")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--exactness", action="store_true")
    kinds.add_argument("--fits", action="store_true")
    kinds.add_argument("--largest", action="store_true")
    kinds.add_argument("--states", action="store_true")
    kinds.add_argument("--regret", action="store_true")
    parser.add_argument(
        "--emulated-gpu", action="store_true", help="for --exactness: host memory, not the folder"
    )
    parser.add_argument("--models", type=lambda text: text.split(","), metavar="A,B")
    parser.add_argument("--plans", help="for --exactness", **some(PLANS))
    parser.add_argument("--contents", help="for --exactness", **some(CONTENTS))
    parser.add_argument("--limit", type=int, default=512, help="MiB, for --fits and --largest")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path, dest="output", help="also write JSON to this file")
    options = parser.parse_args()
    if options.exactness:
        chosen = options.models or NAMES, options.plans, options.contents
        folder = None if options.emulated_gpu else options.folder
        return 0 if sweep(folder, *chosen, options.output) else 1
    if options.regret:
        names = options.models or regret.NAMES
        found = regret.regret(options.folder, names, options.rounds, options.output)
        return 0 if regret.is_low(found["regret"]) else 1
    if options.fits:
        sizes = options.rows or 64, options.width or 512, options.layers or 64
        return 0 if fits(options.folder, options.limit, *sizes, options.output) else 1
    if options.largest:
        sizes = options.rows or 64, options.width or 1024
        return 0 if largest(options.folder, options.limit, *sizes, options.output) else 1
    if options.states:
        sizes = options.rows or 64, options.width or 1024, options.layers or 4
        found = states.compare(options.folder, *sizes, options.rounds) | about()
    else:
        sizes = options.rows or 4096, options.width or 512, options.layers or 6
        found = compare(options.folder, *sizes, options.rounds) | about()
    for name, seconds in found["seconds"].items():
        print(f"{name:9} {seconds * 1e3:8.1f} ms")
    print({name: found[name] for name in ("ratio", "losses", "reached") if name in found})
    if options.output:
        save(options.output, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
