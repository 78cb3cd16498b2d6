"""One process of one part: `python -m benchmarks.gpu.worker PART ROWS [--dry-run]`."""

from __future__ import annotations

import argparse
import os
import warnings
from pathlib import Path

import torch

import autopar
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.setting import Setting


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=[*PARTS])
    parser.add_argument("rows", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore", autopar.AutoparWarning)
    if options.dry_run:
        torch.set_num_threads(1)
    setting = Setting(options.dry_run, options.rows, int(os.environ.get("RANK", "0")))
    PARTS[options.part].load()(setting)


if __name__ == "__main__":
    main()
