"""Random recipes, and whether a model is fit as a test."""

from __future__ import annotations

import math
import random
import warnings
from dataclasses import replace

import torch

from benchmarks.truth.recipe import Recipe, Trained, deviation, train
from benchmarks.truth.registry import BLOCKS
from tests.harness.worlds import RankError, run

PLAIN_SHARE = 0.4  # probability of a plain block, where there are any of a kind

TRAITS = ("tied", "frozen", "decay", "untouched")
NOISE = 1e-14
WELL_CONDITIONED = 1e-11
SMALLEST_GRADIENT = 1e-7


def recipe(seed: int, number: int) -> Recipe:
    """Return model `number` of a seed: the first draw of it that is sound."""
    for attempt in range(100):
        drawn = _draw(random.Random(f"{seed}/{number}/{attempt}"))
        for candidate in (drawn, replace(drawn, optimizer="sgd")):
            if is_sound(candidate):
                return candidate
    raise RuntimeError(f"no sound model in 100 draws: seed {seed}, number {number}")


def single_block(name: str) -> Recipe:
    """Return a model of one block with little around it, at seven rows if the block allows it."""
    kind, _, part = BLOCKS[name].kind.partition("_")
    if part == "head":
        before = {"rows": "Gated", "sequence": "LayerNorm", "image": "GroupNorm"}[kind]
        blocks = (before, name)
    elif part == "pool" or kind == "rows":
        blocks = (name, "mse")
    else:
        blocks = (name, "mean_over_time" if kind == "sequence" else "mean_over_pixels", "mse")
    rows = 7 if BLOCKS[name].divides == 1 else 8
    return Recipe(seed=3, stem=kind, blocks=blocks, optimizer="sgd", rows=rows)


def is_sound(candidate: Recipe) -> bool:
    """Whether the plain model trains, on finite numbers, and rounding errors stay small.

    The trial runs in a process of its own, since some of torch's kernels end theirs.
    """
    try:
        return not run(_reason, 1, init=False, candidate=candidate)[0]
    except RankError:
        return False


def _reason(rank: int, world_size: int, candidate: Recipe) -> str:
    return why_unsound(candidate)


def why_unsound(candidate: Recipe) -> str:
    """Return the reason why a model is unfit as a test; empty if it is fit."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            first, again = train_plain(candidate), train_plain(candidate)
            noisy = [train_plain(candidate, noise) for noise in (NOISE, -NOISE)]
    except (RuntimeError, ValueError, IndexError) as error:
        return f"raises {type(error).__name__}: {error}"
    if not all(map(math.isfinite, first.losses)):
        return "losses are not finite"
    if deviation(again, first)[0] > 0:
        return "is not deterministic"
    if (worst := max(deviation(run, first) for run in noisy))[0] > WELL_CONDITIONED:
        return f"is ill-conditioned: {worst[0]:.0e} in {worst[1]}"
    if sum(math.isfinite(g) and g > SMALLEST_GRADIENT for g in first.gradients.values()) < 2:
        return "has no gradients"
    return ""


def train_plain(drawn: Recipe, noise: float = 0.0) -> Trained:
    torch.manual_seed(drawn.seed)
    return train(drawn.make(), drawn, noise)


def _draw(rng: random.Random) -> Recipe:
    stem = rng.choices(["rows", "sequence", "tokens", "image"], [6, 2, 1, 2])[0]
    drawn = Recipe(
        stem=stem,
        blocks=_draw_blocks(rng, stem),
        seed=rng.randrange(1 << 20),
        traits=tuple(trait for trait in TRAITS if rng.random() < 0.1),
        call=rng.choices(["positional", "keywords", "dict"], [6, 2, 1])[0],
        returns=rng.choices(["loss", "tuple", "dict"], [6, 1, 1])[0],
        optimizer=rng.choice(["adamw", "sgd"]),
        example_inputs=rng.random() < 0.5,
    )
    return replace(drawn, rows=rng.choice([n for n in range(6, 13) if n % drawn.divides == 0]))


def _draw_blocks(rng: random.Random, stem: str) -> tuple[str, ...]:
    """Two to four blocks and a head."""
    if stem == "rows":
        return (*_some(rng, "rows", rng.choice([2, 2, 3, 4])), *_some(rng, "rows_head", 1))
    kind = "image" if stem == "image" else "sequence"
    names = _some(rng, kind, rng.choice([1, 2]))
    if rng.random() < 0.3:
        return (*names, *_some(rng, f"{kind}_head", 1))
    names += _some(rng, f"{kind}_pool", 1) + _some(rng, "rows", rng.choice([0, 1]))
    return (*names, *_some(rng, "rows_head", 1))


def _some(rng: random.Random, kind: str, count: int) -> list[str]:
    plain = [name for name, block in BLOCKS.items() if block.kind == kind and block.plain]
    others = [name for name, block in BLOCKS.items() if block.kind == kind and not block.plain]
    from_plain = sum(rng.random() < PLAIN_SHARE for _ in range(count)) if plain else 0
    names = rng.sample(plain, min(from_plain, len(plain)))
    names += rng.sample(others, count - len(names))
    rng.shuffle(names)
    return names
