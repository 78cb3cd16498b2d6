"""`search_configs`: the fastest configuration that fits, by simulation of the lowered program."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from operator import attrgetter, itemgetter

from autopar.core.common.deadline import TimeIsOver, arm
from autopar.core.plan.buckets import BUCKET_BYTES
from autopar.core.plan.layout import Layout
from autopar.core.plan.plan import Plan
from autopar.core.plan.recompute import ALL_LEVELS, LEVELS, PARTITIONED_LEVELS, Level
from autopar.core.plan.search_outcome import SearchOutcome
from autopar.core.plan.strategy import Strategy
from autopar.errors import OutOfMemoryError
from autopar.formatting import human_bytes, memory_text
from autopar.planner.evaluate.bandwidth_sweep import sweep_bandwidth
from autopar.planner.evaluate.candidate import (
    Candidate,
    CandidateConfig,
    compression_of,
    default_config,
)
from autopar.planner.evaluate.evaluator import Evaluator
from autopar.planner.offload_choices import offloaded
from autopar.planner.search.chunked_loss import chunked, least_bytes
from autopar.planner.search.runners_up import runners_up
from autopar.planner.search.state_bytes import least_state_bytes

LARGER_BUCKETS = (4 * BUCKET_BYTES, 16 * BUCKET_BYTES)
SMALLER_BUCKETS = (BUCKET_BYTES // 4, BUCKET_BYTES // 8, BUCKET_BYTES // 16)
"""Bucket sizes in bytes, tried in order beside the default."""

DEEPER_PREFETCH = (2, 8)
"""Numbers of buckets gathered ahead, tried where collectives are not scheduled one by one."""

BUCKETS_AT_ONCE = 16
"""Most buckets in memory at once, for what smaller ones can save."""

HOPELESS = 1.5
"""Largest ratio to the incumbent's step time of a plan whose bandwidths are swept."""


def search_configs(
    evaluators: Iterable[Evaluator],
    strategy: Strategy,
    cap: int | None,
    incumbent_s: float = math.inf,
    first: CandidateConfig | None = None,
    *,
    unscheduled: bool = False,
) -> Candidate:
    """The fastest plan of any evaluator with a peak of at most `cap` bytes, until the deadline.

    The search is deterministic. It first evaluates uniform ZeRO stages without recomputation. If
    the fastest does not fit, it raises recomputation or the ZeRO stage block by block, the fastest
    candidate first. If that is not enough, it tries smaller buckets. It tunes bucket sizes on the
    winner. If no ZeRO stage beats `incumbent_s` seconds even without exposed communication, it
    returns the fastest of those that fit. If `first` is given and fits, with more recomputation if
    need be, only its buckets and schedules are tuned. If `unscheduled`, deeper prefetching replaces
    schedules.

    Raises:
        OutOfMemoryError: nothing fits; raises the least shortfall.
    """
    found: list[Candidate] = []
    failures: list[OutOfMemoryError] = []
    try:
        for evaluator in evaluators:
            search = _ConfigSearch(evaluator, strategy, cap, incumbent_s, first, unscheduled)
            try:
                found.append(search.best_with_report())
            except OutOfMemoryError as failure:
                failures.append(failure)
            if found and not evaluator.setup.deadline():
                break  # before the next one is built
    except TimeIsOver:
        if not found:
            raise
    if not found:
        raise min(failures, key=lambda failure: failure.shortfall)
    best = min(found, key=attrgetter("step_s"))
    bounds_s = [each.plan.search.bound_s for each in found if each.plan.search is not None]
    return best.with_plan(search=SearchOutcome(bound_s=min(bounds_s)))


@dataclass
class _ConfigSearch:
    """A search over the configurations of one evaluator.

    Attributes:
        bound_s: lower bound of their steps in seconds, as if no communication were exposed.
    """

    evaluator: Evaluator
    strategy: Strategy
    cap: int | None
    incumbent_s: float
    first: CandidateConfig | None = None
    unscheduled: bool = False
    bound_s: float = 0.0
    candidates: dict[CandidateConfig, Candidate] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.setup, self.blocks = self.evaluator.setup, self.evaluator.setup.blocks
        self.levels = PARTITIONED_LEVELS if self.setup.base.partitions else LEVELS
        self.raise_order = [*filter(None, self.blocks), ""]  # the repeated blocks first

    def best_with_report(self) -> Candidate:
        """The best candidate, its plan with runners-up; raises OutOfMemoryError if nothing fits."""
        try:
            best = self.best_candidate()
        except TimeIsOver:
            best = self.best_known()
        best = best.with_plan(
            runners_up=runners_up(best, self.candidates.values(), self.cap),
            memory_cap=self.cap,
            search=SearchOutcome(bound_s=self.bound_s),
        )
        try:
            return replace(best, plan=self.with_bandwidth_sweep(best.plan, best.config))
        except TimeIsOver:
            return best

    def best_candidate(self) -> Candidate:
        base = self.setup.base
        if self.first is not None and (seed := self.fit(self.first)) is not None:
            return self.tune(seed) if self.setup.deadline() else seed
        below, starts = self.starts()
        if math.isinf(self.incumbent_s) and self.setup.deadline():
            with contextlib.suppress(TimeIsOver):  # the first start may be known already
                self.evaluate(starts[-1])  # the likeliest to fit, so that there is an answer soon
        starts = self.affordable(starts)
        if below is not None and self.fits(self.evaluate(starts[0])):
            starts = [below, *starts]  # some blocks of each may be faster
        found = [self.evaluate(config) for config in starts]
        best = self.best(found)
        # without exposed communication: a bound for all buckets and schedules
        hopeless = min(map(_hidden_s, found)) >= self.incumbent_s
        best_s, raised = math.inf if best is None else best.step_s, list[Candidate]()
        if not hopeless and any(not self.fits(c) and c.step_s < best_s for c in found):
            raised = [*filter(None, self.raised(starts, best))]
            best = self.best([*raised, best])
        self.bound_s = self.least_s(found, raised, best, all_raised=not hopeless)
        if best is None:
            raise self.nothing_fits()
        communicates = base.dp_size > 1 or base.partitions
        return self.tune(best) if not hopeless and communicates and self.setup.deadline() else best

    def least_s(
        self,
        starts: Sequence[Candidate],
        raised: Sequence[Candidate],
        best: Candidate | None,
        *,
        all_raised: bool,
    ) -> float:
        """Lower bound of all steps in seconds: the least with all communication hidden.

        A start that does not fit counts as it is, unless it was raised until it fits.
        """
        limit_s = best.step_s if best is not None and all_raised and self.setup.deadline() else 0.0
        plain = (c for c in starts if self.fits(c) or c.step_s >= limit_s)
        return min(map(_hidden_s, (*plain, *filter(self.fits, raised))), default=0.0)

    def best_known(self) -> Candidate:
        """The best candidate so far, when time is over; raises TimeIsOver if none fits."""
        best = self.best(self.candidates.values())
        if best is None:
            raise TimeIsOver
        return best

    def starts(self) -> tuple[CandidateConfig | None, list[CandidateConfig]]:
        """Configurations with uniform ZeRO stages that may fit; always the most sharded one.

        The first result is the most sharded one that cannot fit, None if there is none.
        """
        base, zero_stages = self.setup.base, [0]
        if self.strategy.zero is None and Layout(base).replicas > 1:
            # stage 2 differs from 1 only where several micro-batches accumulate
            zero_stages = [0, 1, 2, 3] if self.strategy.pipelined else [0, 1, 3]
            if base.hybrid:
                zero_stages.remove(0)  # without shards there is nothing to replicate
        configs = (default_config(self.strategy, self.blocks, stage) for stage in zero_stages)
        *lower, last = dict.fromkeys(configs)
        fitting = [*filter(self.may_fit, lower), last]
        below = [config for config in lower if config not in fitting]
        return (below[-1] if below else None), fitting

    def affordable(self, starts: Sequence[CandidateConfig]) -> list[CandidateConfig]:
        """The first configurations; stops after the deadline once one of them fits."""
        found: list[CandidateConfig] = []
        for config in starts:
            if any(map(self.fits, map(self.evaluate, found))) and not self.setup.deadline():
                break
            found.append(config)
        return found

    def raised(
        self, starts: Sequence[CandidateConfig], best: Candidate | None
    ) -> Iterator[Candidate | None]:
        """Raises recomputation or ZeRO stages of the starts until they fit, the fastest first.

        Raising never makes a step shorter, so candidates slower than the best feasible one are
        skipped. After the deadline the search stops at the first feasible candidate.
        """
        limit_s = best.step_s if best is not None else math.inf
        steps_s = [self.evaluate(config).step_s for config in starts]
        options = [(s, partial(self.fit, c)) for s, c in zip(steps_s, starts, strict=True)]
        pairs = zip(pairwise(steps_s), pairwise(starts), strict=True)
        options += [(min(both), partial(self.mix, *pair)) for both, pair in pairs]
        for least_s, raise_ in sorted(options, key=itemgetter(0)):
            if least_s < limit_s and (math.isinf(limit_s) or self.setup.deadline()):
                candidate = raise_()
                if candidate is not None and self.fits(candidate):
                    limit_s = min(limit_s, candidate.step_s)
                yield candidate

    def may_fit(self, config: CandidateConfig) -> bool:
        """Whether a rank's share of parameters, gradients and optimizer states is under the cap.

        Stage 1 keeps gradients whole while micro-batches accumulate.
        """
        base = self.setup.base
        least = least_state_bytes(
            self.setup.parameters.values(),
            dict(config.zero_stages),
            self.strategy.dp_shard or base.dp_size,
            base.optimizer_state_ratio,
            accumulates=self.strategy.pipelined,
            stored=self.strategy.stores_parameters,
        )
        return self.cap is None or least <= self.cap * base.model_parallel_size * base.pp_size

    def evaluate(self, config: CandidateConfig) -> Candidate:
        if config not in self.candidates:
            self.candidates[config] = self.evaluator.evaluate(config)
            if self.fits(self.candidates[config]):
                arm()
        return self.candidates[config]

    def fits(self, candidate: Candidate) -> bool:
        return candidate.fits(self.cap)

    def best(self, candidates: Iterable[Candidate | None]) -> Candidate | None:
        """The fastest candidate that fits; ties go to the smallest, then the first."""
        fitting = [each for each in candidates if each is not None and self.fits(each)]
        return min(fitting, key=attrgetter("step_s", "needed_bytes"), default=None)

    def fit(self, config: CandidateConfig) -> Candidate | None:
        """The candidate with the least recomputation that fits; tries small buckets last."""
        if not self.fits(self.evaluate(config)) and not self.may_fit(config):
            return None
        found, base = self.recomputed(config) if self.can_fit(config) else None, self.setup.base
        communicates = base.dp_size > 1 or base.partitions
        if found is not None or not communicates:
            return found
        smaller = self.with_buckets(config, SMALLER_BUCKETS[0])
        saved = BUCKETS_AT_ONCE * max(config.gather_bytes, config.reduce_bytes)
        near = self.can_fit(config, saved) and self.can_fit(smaller)
        return self.recomputed(smaller) if near else None

    def can_fit(self, config: CandidateConfig, more: int = 0) -> bool:
        """Whether a configuration fits in so many more bytes if all activations are recomputed.

        Those that may be stored instead are not looked at.
        """
        if self.strategy.recompute is not None or self.strategy.offload == "auto":
            return True
        most = self.recomputing(config, self.levels[-1], len(self.raise_order))
        return self.cap is None or least_bytes(self, most, self.cap) <= self.cap + more

    def recomputed(self, config: CandidateConfig) -> Candidate | None:
        """The fastest that fit with the least recomputation, offload, and chunks of the loss."""
        if self.fits(self.evaluate(config)):
            return self.evaluate(config)
        found = [self.raised_levels(config)]
        if self.strategy.offload == "auto":
            found += offloaded(self, config, found[0])
        found += chunked(self, config)
        return self.best(found)

    def raised_levels(self, config: CandidateConfig) -> Candidate | None:
        """The candidate with the least recomputation that fits, raised block by block."""
        if self.strategy.recompute is not None:
            return None
        for level in self.levels[1:]:
            levels = dict(config.recompute)
            own = [ALL_LEVELS.index(levels[block]) for block in self.raise_order]
            if max(own) > ALL_LEVELS.index(level):
                continue  # some blocks recompute more already
            with_blocks = partial(self.recomputing, config, level)
            highest = with_blocks(len(self.raise_order))
            if self.fits(self.evaluate(highest)):
                return self.fewest_blocks(with_blocks, own.count(ALL_LEVELS.index(level)))
            config = highest
        return None

    def with_buckets(self, config: CandidateConfig, nbytes: int) -> CandidateConfig:
        """The configuration with another bucket size, where the strategy leaves it open."""
        gather, reduce = self.strategy.gather_bytes or nbytes, self.strategy.reduce_bytes or nbytes
        return replace(config, gather_bytes=gather, reduce_bytes=reduce)

    def recomputing(self, config: CandidateConfig, level: Level, count: int) -> CandidateConfig:
        levels = dict(config.recompute) | dict.fromkeys(self.raise_order[:count], level)
        return replace(config, recompute=tuple((block, levels[block]) for block in self.blocks))

    def mix(self, low: CandidateConfig, high: CandidateConfig) -> Candidate | None:
        """The candidate that fits with the fewest blocks at the higher of two ZeRO stages."""
        if self.fits(self.evaluate(low)) or not self.fits(self.evaluate(high)):
            return None

        def with_blocks(count: int) -> CandidateConfig:
            higher = {block: dict(high.zero_stages)[block] for block in self.raise_order[:count]}
            stages = dict(low.zero_stages) | higher
            return replace(low, zero_stages=tuple((block, stages[block]) for block in self.blocks))

        return self.fewest_blocks(with_blocks)

    def fewest_blocks(
        self, with_blocks: Callable[[int], CandidateConfig], low: int = 0
    ) -> Candidate:
        """The candidate with the smallest number of raised blocks that fits.

        Raising every block must fit, and raising the first `low` must not. Bytes are nearly linear
        in the number of blocks, so interpolation comes first, and bisection where it converges
        slowly.
        """
        high, interpolate = len(self.raise_order), True

        def excess(count: int) -> int:
            assert self.cap is not None
            return self.evaluate(with_blocks(count)).needed_bytes - self.cap

        while high - low > 1 and self.setup.deadline():
            over, under = excess(low), excess(high)
            guess = low + math.ceil((high - low) * over / max(1, over - under))
            count = min(max(guess, low + 1), high - 1) if interpolate else (low + high) // 2
            before = high - low
            if excess(count) <= 0:
                high = count
            else:
                low = count
            interpolate = interpolate != (high - low > before // 2)
        return self.evaluate(with_blocks(high))

    def tune(self, best: Candidate) -> Candidate:
        """Tries other bucket sizes, hierarchical and scheduled collectives, then compression."""
        found = self.resized(best, LARGER_BUCKETS)
        if found is best:
            found = self.resized(best, SMALLER_BUCKETS)
        if self.unscheduled:
            found = self.prefetched(found)
        routes = [found.config]
        if self.strategy.hierarchical is None and self.setup.base.levels:
            routes.append(replace(found.config, hierarchical=True))
        options = [self.evaluate(route) for route in routes]
        if self.strategy.prefetch is None:
            options += [candidate for route in routes for candidate in self.scheduled(route)]
        return self.compressed(self.best([found, *options]) or found)

    def resized(self, best: Candidate, sizes: Iterable[int]) -> Candidate:
        """Tries bucket sizes, unless the first one does not help."""
        start = best
        for nbytes in sizes:
            other = self.evaluate(self.with_buckets(best.config, nbytes))
            best = self.best([best, other]) or best
            # Sizes that suit no layer may lose to the next one, so only the first ends the loop.
            if best is start:
                break
        return best

    def prefetched(self, best: Candidate) -> Candidate:
        """Tries to gather more buckets ahead, while that helps."""
        if not any(stage for _, stage in best.config.zero_stages):
            return best
        for depth in DEEPER_PREFETCH:
            other = self.evaluate(replace(best.config, prefetch=depth))
            if (found := self.best([best, other])) is best:
                break
            best = found or best
        return best

    def scheduled(self, config: CandidateConfig) -> Iterator[Candidate]:
        """The configuration with scheduled collectives; without prefetching if only that fits."""
        yield (unlimited := self.evaluate(replace(config, scheduled=True)))
        if not self.fits(unlimited):
            yield self.evaluate(replace(config, scheduled=True, prefetch_budget_bytes=0))

    def compressed(self, best: Candidate) -> Candidate:
        """Tries the allowed compressions on all gradient buckets, then on the last buckets alone.

        The backward hides the earlier buckets, if any.
        """
        buckets = len(best.plan.buckets.reduce)
        if self.strategy.compress is not None or not buckets:
            return best
        for method in map(compression_of, self.strategy.lossy):
            counts = dict.fromkeys(-(-buckets * quarter // 4) for quarter in (4, 3, 2, 1))
            mixtures = (("",) * (buckets - count) + (method,) * count for count in counts)
            tried = [self.evaluate(replace(best.config, compress=mixture)) for mixture in mixtures]
            best = self.best([best, *tried]) or best
        return best

    def with_bandwidth_sweep(self, plan: Plan, config: CandidateConfig) -> Plan:
        """Adds step times at other bandwidths, of the plan and of the best other ZeRO stages."""
        cost = plan.prediction
        assert cost is not None
        if not cost.communication_s or cost.step_s > HOPELESS * self.incumbent_s:
            return plan
        fitting = (each for each in self.candidates.values() if self.fits(each))
        others = [each for each in fitting if each.plan.zero_stages != plan.zero_stages]
        if not others and math.isinf(self.incumbent_s):
            return plan  # no alternative could win at any bandwidth
        swept = replace(cost, at_rates=sweep_bandwidth(self.evaluator, config))
        plan = replace(plan, prediction=swept)
        if not others:
            return plan
        rival = min(others, key=attrgetter("step_s"))
        rates, name = sweep_bandwidth(self.evaluator, rival.config), rival.plan.name
        runners_up = (
            replace(other, at_rates=rates) if other.name == name else other
            for other in plan.runners_up
        )
        return replace(plan, runners_up=tuple(runners_up))

    def nothing_fits(self) -> OutOfMemoryError:
        assert self.cap is not None
        smallest = min(self.candidates.values(), key=attrgetter("needed_bytes"))
        short, memory = smallest.needed_bytes - self.cap, smallest.prediction.memory
        return OutOfMemoryError(
            f"nothing fits under {human_bytes(self.cap)} per rank: the smallest plan "
            f"({smallest.plan.name}) needs {human_bytes(short)} more ({short} bytes). Its peak is "
            f"{memory_text(memory)}.",
            short,
            memory,
            cap=self.cap,
        )


def _hidden_s(candidate: Candidate) -> float:
    """Seconds of a step if no communication were exposed."""
    return candidate.step_s - candidate.prediction.exposed_s
