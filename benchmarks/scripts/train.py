"""`train`: one script on this rank, by its number."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autopar.errors import AutoparError
from benchmarks.integrations.record import forget_accelerator, whole_weights
from benchmarks.scripts import loops, trainers
from benchmarks.scripts.run import Run
from tests.harness.training import fixed

SCRIPTS: tuple[Callable[[Run], nn.Module], ...] = (
    trainers.text_classification,
    trainers.language_modeling,
    trainers.masked_modeling,
    trainers.translation,
    trainers.token_classification,
    trainers.image_classification,
    trainers.adapters,
    trainers.fine_tuning,
    trainers.preferences,
    trainers.rewards,
    trainers.sentence_pairs,
    trainers.sentence_scores,
    loops.autoencoder,
    loops.lightning_classifier,
    loops.fabric_pictures,
    loops.fabric_accumulation,
    loops.nlp_example,
    loops.accumulation_example,
    loops.diffusion,
    loops.timm_training,
    loops.timm_convolutions,
)
PLANS = {"ddp": fixed(0), "zero3": fixed(3), "tp2": fixed(0, tp=2)}


@dataclass(frozen=True)
class Outcome:
    """Whole weights of a rank after a script, or an error, and autopar's warnings."""

    weights: dict[str, Tensor]
    warnings: tuple[str, ...]
    error: str = ""


def train(rank: int, ranks: int, number: int, plan: str, folder: str) -> Outcome:
    """Runs a script by its number; under no plan it is the library's own run."""
    multiprocessing.current_process().name = "MainProcess"  # as under torchrun; collators ask
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    forget_accelerator()
    found: dict[str, Tensor] = {}
    error = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = whole_weights(SCRIPTS[number](Run(folder, ranks, PLANS.get(plan))))
        except AutoparError as raised:
            error = f"autopar.{type(raised).__name__}: {raised}"
    own = (w for w in caught if w.category.__module__.startswith("autopar"))
    told = {f"{w.category.__name__}: {str(w.message)[:120]}" for w in own}
    return Outcome(found, tuple(sorted(told)), error)
