"""Random recipes of loops."""

from __future__ import annotations

import itertools
import math
import random
import warnings
from collections.abc import Iterable
from dataclasses import replace

import torch

from benchmarks.loops.elements import ELEMENTS, GROUPS
from benchmarks.loops.loop import LOSSES, OPTIMIZERS, Element, Loop, Observed, Recipe
from benchmarks.loops.models import FORMS, NETS

SHARE = 0.5
"""Probability that a loop has an element of a group."""

SHARE_OF_BFLOAT16 = 0.15
"""Probability that a loop computes in bfloat16."""

SETUPS: dict[str, tuple[int, tuple[int, ...]]] = {
    "ddp": (4, (2, 3)),
    "zero2": (2, (2, 3)),
    "zero3": (4, (2, 3)),
    "tp2": (3, (2,)),
    "pp2": (3, (2,)),
    "cp2": (1, (2,)),
    "cp2-zero3": (1, (2,)),
    "ep2-zero3": (1, (2,)),
    "auto": (1, (2,)),
    "offload": (1, (2,)),
    "ddp-local": (2, (2, 3)),
    "zero3-local": (2, (2, 3)),
}
"""Name of a setup -> how often it is drawn, and world sizes."""


def recipe(seed: int, number: int) -> Recipe:
    """Recipe `number` of a seed: the first draw of it by which the plain model trains."""
    for attempt in itertools.count():
        drawn = _draw(random.Random(f"{seed}/{number}/{attempt}"))
        if is_sound(drawn):
            return drawn
    raise AssertionError


def is_sound(drawn: Recipe) -> bool:
    """Whether the plain model trains, on finite numbers."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return all(map(math.isfinite, train_plain(drawn).values))
    except (RuntimeError, ValueError):  # elements that do not go together
        return False


def train_plain(recipe: Recipe, noise: float = 0.0, seed: int = 0) -> Observed:
    """The numbers of one process, from weights with relative noise."""
    model, generator = recipe.make(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters() if noise else ():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.mul_(1 + noise * drawn)
    if recipe.casts_forward:
        model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    values = Loop(recipe, model, elements_of(recipe), lambda other: other).run()
    return Observed(values, {n: t.detach().clone() for n, t in model.state_dict().items()})


def train_in_float32(recipe: Recipe) -> Observed:
    """The numbers of one process without autocast."""
    elements = tuple(name for name in recipe.elements if name != "autocast")
    return train_plain(replace(recipe, compute="float32", elements=elements))


def _draw(rng: random.Random) -> Recipe:
    setup = rng.choices(list(SETUPS), [often for often, _ in SETUPS.values()])[0]
    elements = _elements(rng, is_local=setup.endswith("local"))
    nets = ["attention"] if setup.startswith("cp2") else list(NETS)
    forms = [f for name in elements for f in ELEMENTS[name].forms] or list(FORMS)
    if setup.endswith("local"):
        # each rank would see other rows
        forms = [form for form in forms if form not in ("rows", "views")]
    net = rng.choice(nets)
    return Recipe(
        rng.randrange(1000),
        net,
        rng.choice(forms),
        rng.choice(list(LOSSES)),
        rng.choice(list(OPTIMIZERS)),
        elements,
        traits_of(elements),
        _rows(rng, setup, net),
        setup,
        rng.choice(SETUPS[setup][1]),
        "bfloat16" if rng.random() < SHARE_OF_BFLOAT16 else "float64",
    )


def traits_of(elements: Iterable[str]) -> tuple[str, ...]:
    """The traits of a model that elements ask for."""
    return tuple(sorted({trait for name in elements for trait in ELEMENTS[name].traits}))


def _rows(rng: random.Random, setup: str, net: str) -> tuple[int, ...]:
    if setup.endswith("local"):
        return (rng.choice((6, 12)),) * 3
    if setup == "pp2":
        return (rng.choice((4, 8)),) * 3
    smallest = 2 if net == "statistics" else 1
    rows = rng.choice(((8, 8, 8), (8, 8, 6), (8, 8, 5), (8, 8, smallest), (8, 5, 6, smallest)))
    return rows[-3:] if net == "recurrent" else rows  # a trace of one takes the longest


def _elements(rng: random.Random, is_local: bool) -> tuple[str, ...]:
    """At least one element, of which one at most computes gradients and forms agree."""
    while True:
        drawn: list[str] = []
        for group in GROUPS.values():
            if rng.random() < SHARE:
                drawn.append(rng.choice(sorted(group)))
        kinds = [ELEMENTS[name] for name in drawn]
        backward = [kind for kind in kinds if kind.backward is not Element.backward]
        forms = {kind.forms for kind in kinds if kind.forms}
        agree = len(backward) <= 1 and len(forms) <= 1
        if drawn and agree and not (is_local and any(kind.is_global for kind in kinds)):
            return tuple(drawn)


def elements_of(recipe: Recipe) -> tuple[Element, ...]:
    """The elements of a recipe, fresh for one run of it."""
    return tuple(ELEMENTS[name]() for name in recipe.elements)
