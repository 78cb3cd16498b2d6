"""Random recipes, and whether a model is fit to judge by."""

from __future__ import annotations

import math
import random
import warnings
from dataclasses import replace

import torch

from benchmarks.truth.model import Recipe
from benchmarks.truth.registry import BLOCKS, Kind
from benchmarks.truth.training import Trained, deviation, train
from tests.harness.worlds import RankError, run

PLAIN = 0.4
"""Share of blocks that treat every row alone, where there are such of a kind."""

PLAIN_BLOCKS = (
    *(name for name, block in BLOCKS.items() if block.theme == "plain"),
    *("Convolution", "SqueezeExcite", "GroupNorm", "max_pooled"),
    *("SelfAttention", "LayerNorm", "token_shift", "TokenMixer", "Gru", "CellLoop", "EncoderLayer"),
    *("CrossEntropy", "mse", "weighted_mse", "RaggedCrossEntropy", "smooth_l1", "MaskedMean"),
    *("TokenCrossEntropy", "MeanOfRowMeans", "PixelCrossEntropy", "reconstruction"),
)

TRAITS = ("tied", "frozen", "decay", "untouched")
NOISE = 1e-14
WELL_CONDITIONED = 1e-11
SMALLEST_GRADIENT = 1e-7


def recipe(seed: int, number: int) -> Recipe:
    """Model `number` of a seed: the first draw of it that is sound."""
    for attempt in range(100):
        drawn = _drawn(random.Random(f"{seed}/{number}/{attempt}"))
        if is_sound(drawn):
            return drawn
        if is_sound(other := replace(drawn, optimizer="sgd")):
            return other
    raise RuntimeError(f"no sound model in 100 draws: seed {seed}, number {number}")


def alone(name: str) -> Recipe:
    """A model of one block with little around it, at seven rows if the block allows it."""
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


def is_sound(given: Recipe) -> bool:
    """Whether the plain model trains, on finite numbers, and rounding stays rounding.

    It is tried in a process of its own: some of torch's kernels end theirs.
    """
    try:
        (reason,) = run(_reason, 1, init=False, given=given)
    except RankError:
        return False
    return not reason


def _reason(rank: int, world_size: int, given: Recipe) -> str:
    return why_unsound(given)


def why_unsound(given: Recipe) -> str:
    """What keeps a model from being a judge; empty for nothing."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            first, again = plain(given), plain(given)
            shaken = [plain(given, noise) for noise in (NOISE, -NOISE)]
    except (RuntimeError, ValueError, IndexError) as error:
        return f"raises {type(error).__name__}: {error}"
    if not all(map(math.isfinite, first.losses)):
        return "losses are not finite"
    if deviation(again, first)[0] > 0:
        return "is not deterministic"
    if (worst := max(deviation(run, first) for run in shaken))[0] > WELL_CONDITIONED:
        return f"is ill-conditioned: {worst[0]:.0e} in {worst[1]}"
    gradients = [g for g in first.gradients.values() if math.isfinite(g)]
    if len([g for g in gradients if g > SMALLEST_GRADIENT]) < 2:
        return "has no gradients"
    return ""


def plain(given: Recipe, noise: float = 0.0) -> Trained:
    """The model trained by plain torch in this process."""
    torch.manual_seed(given.seed)
    return train(given.make(), given, noise)


def _drawn(rng: random.Random) -> Recipe:
    stem = rng.choices(["rows", "sequence", "tokens", "image"], [6, 2, 1, 2])[0]
    blocks = _blocks(rng, stem)
    traits = tuple(trait for trait in TRAITS if rng.random() < 0.1)
    drawn = Recipe(
        seed=rng.randrange(1 << 20),
        stem=stem,
        blocks=blocks,
        traits=traits,
        call=rng.choices(["positional", "keywords", "dict"], [6, 2, 1])[0],
        returns=rng.choices(["loss", "tuple", "dict"], [6, 1, 1])[0],
        optimizer=rng.choice(["adamw", "sgd"]),
        planned_early=rng.random() < 0.5,
    )
    return replace(drawn, rows=rng.choice([n for n in range(6, 13) if n % drawn.multiple == 0]))


def _blocks(rng: random.Random, stem: str) -> tuple[str, ...]:
    """Two to four blocks and a head."""
    if stem == "rows":
        return (*_some(rng, "rows", rng.choice([2, 2, 3, 4])), *_some(rng, "rows_head", 1))
    kind: Kind = "image" if stem == "image" else "sequence"
    names = _some(rng, kind, rng.choice([1, 2]))
    if rng.random() < 0.3:
        return (*names, *_some(rng, f"{kind}_head", 1))
    names += _some(rng, f"{kind}_pool", 1) + _some(rng, "rows", rng.choice([0, 1]))
    return (*names, *_some(rng, "rows_head", 1))


def _some(rng: random.Random, kind: str, count: int) -> list[str]:
    """Distinct blocks of a kind; those that treat every row alone come up as often as PLAIN."""
    plain = [name for name in PLAIN_BLOCKS if BLOCKS[name].kind == kind]
    others = [name for name, it in BLOCKS.items() if it.kind == kind and name not in plain]
    from_plain = sum(rng.random() < PLAIN for _ in range(count)) if plain else 0
    names = rng.sample(plain, min(from_plain, len(plain)))
    names += rng.sample(others, count - len(names))
    rng.shuffle(names)
    return names
