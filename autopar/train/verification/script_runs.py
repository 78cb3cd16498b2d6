"""`compare_runs`: a script's steps under its plans, beside those of the plain model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from autopar.core.common.tolerances import TOLERANCES
from autopar.errors import StrategyError
from autopar.train.verification.deviation import KINDS, Comparison, Deviation, Verification
from autopar.train.verification.script_record import Summary, step_file

ALLOWANCE = 10.0
"""Factor of a dtype's tolerance, as each step of a script amplifies the rounding of the last."""

LOCAL = (
    "batch='local': compared with the plain model under DistributedDataParallel, where each rank "
    "has the batch norm and the losses of its own rows"
)

COARSE_EPS = 1e-4
"""Rounding of a dtype (relative) above which a verdict says that it is coarse."""

COARSE = (
    "compared in {dtype}, whose rounding allows differences up to {tolerance:.2g}: for a sharper "
    "verdict run the script in float32, or autopar verify on a make() in float64"
)


def folder_of(run: Path, rank: int) -> Path:
    """The folder of a rank's record in the folder of a run."""
    return run / f"rank{rank}"


def compare_runs(compiled: Path, plain: Path, tolerance: float | None = None) -> Verification:
    """Compares the records of two runs of a script, each in its folder.

    `tolerance` is the relative difference that passes; by default that of the least precise dtype
    of the plain run, times `ALLOWANCE`.

    Raises:
        StrategyError: one run made more steps than the other.
    """
    summary = Summary.load(folder_of(compiled, 0))
    reference = Summary.load(folder_of(plain, 0))
    if summary.steps != reference.steps:
        raise StrategyError(
            f"the script's optimizers made {summary.steps} steps with its compiled models, and "
            f"{reference.steps} with the plain ones, so the runs cannot be compared. Each has to "
            "start anew: does the script resume from files that the first run wrote?"
        )
    dtype: torch.dtype = getattr(torch, reference.dtype)
    if tolerance is None:
        tolerance = ALLOWANCE * TOLERANCES.get(dtype, 1e-5)
    notes = [LOCAL] if "local" in summary.batches else []
    if torch.finfo(dtype).eps > COARSE_EPS:
        notes.append(COARSE.format(dtype=reference.dtype, tolerance=tolerance))
    comparison = Comparison(tolerance, torch.finfo(dtype).eps)
    for step in range(1, max(summary.steps, reference.steps) + 1):
        actual, expected = (_tensors(run, step) for run in (compiled, plain))
        for kind in KINDS[1:]:
            comparison.add(kind, step, actual.get(kind, {}), expected.get(kind, {}))
    worst = comparison.everywhere()
    return Verification(
        None,
        worst.get("gradient", Deviation("gradient")),
        worst.get("parameter", Deviation("parameter")),
        worst.get("buffer"),
        tolerance,
        dtype,
        summary.steps,
        summary.ranks,
        comparison.first,
        tuple(dict.fromkeys((*summary.draws, *reference.draws))),
        (*notes, *comparison.notes, *summary.notes),
    )


def _tensors(run: Path, step: int) -> Mapping[str, Mapping[str, Tensor]]:
    """The tensors of a step by kind and name, of all ranks that wrote some."""
    merged: dict[str, dict[str, Tensor]] = {}
    for path in sorted(run.glob(f"rank*/{step_file(Path(), step).name}")):
        for kind, tensors in torch.load(path, mmap=True, weights_only=True).items():
            merged.setdefault(kind, {}).update(tensors)
    return merged
