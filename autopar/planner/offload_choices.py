"""`offloaded`: configurations that fit with activations or parameters on a lower level."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from autopar.core.plan.recompute import LEVELS, Level
from autopar.core.plan.strategy import Strategy
from autopar.planner.evaluate.candidate import Candidate, CandidateConfig
from autopar.planner.evaluate.setup import EvaluationSetup


class ConfigSearch(Protocol):
    """Search over configurations, as `search_configs` runs it."""

    setup: EvaluationSetup
    strategy: Strategy
    raise_order: list[str]

    def evaluate(self, config: CandidateConfig) -> Candidate: ...
    def fits(self, candidate: Candidate) -> bool: ...
    def best(self, candidates: Sequence[Candidate | None]) -> Candidate | None: ...
    def raised_levels(self, config: CandidateConfig) -> Candidate | None: ...
    def recomputing(self, config: CandidateConfig, level: Level, count: int) -> CandidateConfig: ...
    def fewest_blocks(self, with_blocks: Callable[[int], CandidateConfig]) -> Candidate: ...


def offloaded(
    search: ConfigSearch, config: CandidateConfig, known: Candidate | None
) -> Iterator[Candidate | None]:
    """Candidates with activations on the lower level, then with parameters there.

    Parameters move only if that may be faster than `known` and all other candidates that fit:
    a step with parameters there gets no shorter by whatever else it does. Those of GPUs move to
    host memory, and so not beside activations in a folder.
    """
    kept = [known, *_activations_offloaded(search, config)]
    yield from kept
    setup = search.setup
    if setup.cluster.on_gpus and setup.base.offload_dir:
        return
    best = search.best(kept)
    moved = replace(config, offload_parameters=True)
    least = search.evaluate(moved)
    if least.step_s >= (math.inf if best is None else best.step_s):
        return
    if search.fits(least):
        yield least
        return
    yield search.raised_levels(moved)
    yield from _activations_offloaded(search, moved)


def _activations_offloaded(
    search: ConfigSearch, config: CandidateConfig
) -> Iterator[Candidate | None]:
    """Candidates of each level of recomputation that fit with the fewest blocks offloaded.

    The last recomputes the fewest blocks beside an offload of all.
    """
    count, fixed = len(search.raise_order), search.strategy.recompute
    levels = LEVELS if fixed is None else (fixed,)
    everything = _offloading(search, config, count)
    for level in levels:
        base = search.recomputing(config, level, count)
        with_blocks = partial(_offloading, search, base)
        if search.fits(search.evaluate(with_blocks(count))):
            fits_already = search.fits(search.evaluate(base))
            yield search.evaluate(base) if fits_already else search.fewest_blocks(with_blocks)
    if len(levels) > 1 and not search.fits(search.evaluate(everything)):
        yield search.raised_levels(everything)


def _offloading(search: ConfigSearch, config: CandidateConfig, count: int) -> CandidateConfig:
    return replace(config, offload=tuple(search.raise_order[:count]))
