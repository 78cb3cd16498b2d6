"""One rank of a case."""

from __future__ import annotations

import logging
import traceback
import warnings
from typing import Any

import torch
from torch.distributed.tensor import DTensor

import autopar
from autopar.cost_model.cluster.cluster import Cluster
from benchmarks.truth.model import Recipe
from benchmarks.truth.outcome import Answer
from benchmarks.truth.strategies import SETUPS
from benchmarks.truth.training import Trained, batch_of, train

TELLING = ("NumericsWarning", "FallbackWarning", "LossyWarning")
"""Classes of warnings that say that numbers differ; others may say what exactness costs."""


def answer(rank: int, world_size: int, recipe: Recipe, setup: str) -> Answer:
    """Train a compiled model and report; errors are part of the report."""
    given = SETUPS[setup]
    share = (rank, world_size) if given.is_local else (0, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logging.disable(logging.CRITICAL)  # torch logs what it raises
        try:
            model = autopar.compile(
                recipe.make(),
                strategy=given.strategy(),
                batch=given.batch,
                cluster=Cluster.default(world_size, "cpu"),
                example_inputs=_example(recipe, share) if recipe.planned_early else None,
                time_limit_s=None,
            )
            torch.manual_seed(recipe.seed)
            trained = _whole(train(model, recipe, share=share))
            made = Answer(trained, notes=_notes(model.plan), fell_back=model.plan is None)
        except autopar.AutoparError as error:
            made = Answer(refusal=f"{type(error).__name__}: {error}")
        except Exception as error:
            made = Answer(crash=f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        finally:
            logging.disable(logging.NOTSET)
    return made._replace(warned=tuple(str(w.message) for w in caught if _tells(w)))


def _example(recipe: Recipe, share: tuple[int, int]) -> Any:
    args, kwargs = batch_of(recipe, 0, share)
    return kwargs or args


def _whole(trained: Trained) -> Trained:
    """What this rank holds: parameters on the meta device are another stage's."""
    held = {n: t for n, t in trained.state.items() if not t.is_meta}
    state = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in held.items()}
    return Trained(trained.losses, {n: t.detach().clone() for n, t in state.items()})


def _notes(plan: autopar.Plan | None) -> tuple[str, ...]:
    return () if plan is None else tuple(map(str, plan.notes))


def _tells(warning: warnings.WarningMessage) -> bool:
    """Whether a warning says that numbers differ, or that autopar does not train."""
    by_class = warning.category.__name__ in TELLING
    return by_class or (warning.category is UserWarning and "autopar" in str(warning.message))
