"""The choice: the fastest plan that fits, by simulation of what would run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from operator import itemgetter

from autopar.errors import OutOfMemoryError
from autopar.formatting import human_bytes, memory_text
from autopar.plan.buckets import BUCKET_BYTES
from autopar.plan.compression import Compression
from autopar.plan.prediction import RUNNERS_UP, RunnerUp, slower
from autopar.plan.recompute import LEVELS, Level
from autopar.plan.strategy import Strategy
from autopar.planner.evaluate.bandwidth_sweep import sweep_bandwidth
from autopar.planner.evaluate.candidate import Candidate, CandidateConfig
from autopar.planner.evaluate.evaluator import Evaluator
from autopar.report.plan import Plan

LARGER_BUCKETS, SMALLER_BUCKETS = (4 * BUCKET_BYTES, 16 * BUCKET_BYTES), (BUCKET_BYTES // 4,)
"""Sizes that are tried beside the default, in order, in bytes."""

LARGER = 3
"""Of how many plans that do not fit a plan keeps what they would have cost, at least."""

HOPELESS = 1.5
"""Times as slow as another mesh, a plan is of no interest whatever the links."""

Progress = Callable[[str], None]


def choose(
    evaluator: Evaluator,
    strategy: Strategy,
    blocks: Sequence[str],
    cap: int | None,
    progress: Progress | None = None,
    incumbent_s: float = math.inf,
) -> Plan:
    """The fastest plan under `strategy` whose peak is at most `cap` bytes.

    Uniform ZeRO stages come first, without recomputation. If the fastest of them does not fit,
    blocks are raised one by one in recomputation or stage, as far as needed, the fastest first;
    where that is not enough, in smaller buckets.
    The sizes of buckets are tried on the winner. Deterministic. Where even without waiting for
    collectives no stage would take less than `incumbent_s` seconds, the first that fits is
    returned.

    Raises:
        OutOfMemoryError: nothing fits.
    """
    search = _Search(evaluator, strategy, blocks, cap, progress, incumbent_s)
    best = search.run()
    plan = replace(best.plan, runners_up=search.runners_up(best), memory_cap=cap)
    return search.with_rates(plan, best.config)


def choose_among(
    evaluators: Iterable[Evaluator],
    strategy: Strategy,
    blocks: Sequence[str],
    cap: int | None,
    incumbent_s: float = math.inf,
) -> Plan:
    """The fastest of what `choose` finds under each of several evaluators that there is time for.

    Raises:
        OutOfMemoryError: nothing fits; the one that lacks least.
    """
    plans: list[Plan] = []
    failures: list[OutOfMemoryError] = []
    for evaluator in evaluators:
        if plans and not evaluator.setup.deadline():
            break
        try:
            plans.append(choose(evaluator, strategy, blocks, cap, incumbent_s=incumbent_s))
        except OutOfMemoryError as failure:
            failures.append(failure)
    if not plans:
        raise min(failures, key=lambda failure: failure.shortfall)
    return min(plans, key=lambda plan: plan.prediction.step_s if plan.prediction else 0.0)


def default_config(strategy: Strategy, blocks: Sequence[str]) -> CandidateConfig | None:
    """The choice of a strategy that leaves nothing to search; None if it leaves something."""
    fixed: tuple[object, ...]
    fixed = (strategy.zero, strategy.recompute, strategy.gather_bytes, strategy.reduce_bytes)
    if strategy.stages > 1:
        schedule = strategy.schedule or ((strategy.stages_per_rank or 1) > 1 or None)
        fixed = (*fixed, strategy.micro_batches, schedule)
    open_to_loss = strategy.compress is None and strategy.lossy
    if open_to_loss or any(value is None for value in fixed):
        return None
    return first_config(strategy, blocks, 0)


def first_config(strategy: Strategy, blocks: Sequence[str], stage: int) -> CandidateConfig:
    """A strategy with what it leaves open set to defaults."""
    zero = strategy.zero
    if isinstance(zero, int):
        stages = dict.fromkeys(blocks, zero)
    else:
        stages = {**dict.fromkeys(blocks, stage), **(zero or {})}
    return CandidateConfig(
        zero_stages=tuple((b, stages[b]) for b in blocks),
        recompute=_levels(blocks, strategy.recompute or "none"),
        gather_bytes=strategy.gather_bytes or BUCKET_BYTES,
        reduce_bytes=strategy.reduce_bytes or BUCKET_BYTES,
        prefetch=1 if strategy.prefetch is None else strategy.prefetch,
        compress=(compression_of(strategy.compress),),
        compress_gathers=compression_of(strategy.compress_gathers),
        compress_activations=compression_of(strategy.compress_activations),
        hierarchical=bool(strategy.hierarchical),
    )


def compression_of(given: str | Compression | None) -> str:
    """What a strategy says of a compression, as a plan writes it: "" for none."""
    return "" if given in (None, "none") else str(Compression.of(given))


class _Search:
    def __init__(
        self,
        evaluator: Evaluator,
        strategy: Strategy,
        blocks: Sequence[str],
        cap: int | None,
        progress: Progress | None,
        incumbent_s: float,
    ) -> None:
        self.evaluator, self.strategy, self.blocks, self.cap = evaluator, strategy, blocks, cap
        self.incumbent_s = incumbent_s
        self.progress = progress or (lambda line: None)
        self.seen: dict[CandidateConfig, Candidate] = {}

    def run(self) -> Candidate:
        one = self.evaluator.setup.base.dp_size == 1
        free = self.strategy.zero is None and not one
        several = self.strategy.pipelined  # of one micro-batch gradients are summed at once
        stages = [0, 1, 2, 3] if several else [0, 1, 3]
        if self.evaluator.setup.base.hybrid:
            stages.remove(0)  # that has no shards
        stages = stages if free else [0]
        starts = [first_config(self.strategy, self.blocks, stage) for stage in stages]
        *lower, last = dict.fromkeys(starts)
        starts = self.looked_at([*filter(self.may_fit, lower), last])
        best = self.best(self.look(choice) for choice in starts)
        if min(_least_s(self.look(choice)) for choice in starts) >= self.incumbent_s:
            if best is None:
                raise self.nothing_fits()
            return best
        if best is None or self.infeasible_and_faster(starts, best):
            found = self.best([*self.fitted(starts, best), *([best] if best else [])])
            if found is None:
                raise self.nothing_fits()
            best = found
        alone = one and not self.evaluator.setup.base.partitions
        return best if alone or not self.evaluator.setup.deadline() else self.tune(best)

    def looked_at(self, starts: Sequence[CandidateConfig]) -> list[CandidateConfig]:
        """Those that there is time to look at, and as many as it takes until one fits."""
        found: list[CandidateConfig] = []
        for choice in starts:
            if any(map(self.fits, map(self.look, found))) and not self.evaluator.setup.deadline():
                break
            found.append(choice)
        return found

    def fitted(
        self, starts: Sequence[CandidateConfig], best: Candidate | None
    ) -> Iterator[Candidate | None]:
        """Starts raised until they fit, the fastest first, and none slower than what fits by then.

        Raising makes nothing faster. When time is up, none but those without which nothing fits.
        """
        limit_s = _step_s(best) if best is not None else math.inf
        steps = [_step_s(self.look(choice)) for choice in starts]
        raising = [(s, partial(self.fit, choice)) for s, choice in zip(steps, starts, strict=True)]
        pairs = zip(pairwise(steps), pairwise(starts), strict=True)
        raising += [(min(both), partial(self.mix, *pair)) for both, pair in pairs]
        for least_s, raised in sorted(raising, key=itemgetter(0)):
            if least_s < limit_s and (math.isinf(limit_s) or self.evaluator.setup.deadline()):
                option = raised()
                if option is not None and self.fits(option):
                    limit_s = min(limit_s, _step_s(option))
                yield option

    def may_fit(self, choice: CandidateConfig) -> bool:
        """Whether a rank's part of parameters and optimizer states is under the cap.

        If all that axes and stages can divide were divided evenly: none can hold less everywhere.
        """
        base, ranks = self.evaluator.setup.base, self.evaluator.setup.base.dp_size
        sizes, blocks = dict(base.parameter_bytes), dict(choice.zero_stages)
        least = 0.0
        for name, info in self.evaluator.setup.parameters.items():
            stage, states = blocks[info.block], base.optimizer_state_ratio * info.requires_grad
            copies = 1.0 / (ranks if stage == 3 else 1) + states / (ranks if stage else 1)
            least += sizes[name] * copies
        return self.cap is None or least <= self.cap * base.model_parallel_size * base.pp_size

    def look(self, choice: CandidateConfig) -> Candidate:
        """Evaluates a choice once."""
        if choice not in self.seen:
            self.progress(str(choice))
            self.seen[choice] = self.evaluator.evaluate(choice)
        return self.seen[choice]

    def fits(self, item: Candidate) -> bool:
        return self.cap is None or item.prediction.needed_bytes <= self.cap

    def best(self, items: Iterable[Candidate | None]) -> Candidate | None:
        """The fastest that fits; of equals, the one that needs less, then the first."""
        fitting = [item for item in items if item is not None and self.fits(item)]
        keys = [(i.prediction.step_s, i.prediction.needed_bytes) for i in fitting]
        return fitting[keys.index(min(keys))] if fitting else None

    def infeasible_and_faster(self, choices: Sequence[CandidateConfig], best: Candidate) -> bool:
        limit = best.prediction.step_s
        return any(
            not self.fits(self.look(c)) and self.look(c).prediction.step_s < limit for c in choices
        )

    def fit(self, choice: CandidateConfig) -> Candidate | None:
        """The least recomputation with which a choice fits, in smaller buckets if it must."""
        if not self.fits(self.look(choice)) and not self.may_fit(choice):
            return None
        return self.recomputed(choice) or self.recomputed(self.in_small_buckets(choice))

    def recomputed(self, choice: CandidateConfig) -> Candidate | None:
        """The least recomputation, block by block, with which a choice fits."""
        if self.fits(self.look(choice)):
            return self.look(choice)
        if self.strategy.recompute is not None:
            return None
        for level in LEVELS[1:]:
            raised = partial(self.recomputing, choice, level)
            if self.fits(self.look(raised(len(self.order)))):
                return self.least(raised)
            choice = raised(len(self.order))
        return None

    def in_small_buckets(self, choice: CandidateConfig) -> CandidateConfig:
        """The same choice in the smallest buckets that are tried, if there are any buckets."""
        if self.evaluator.setup.base.dp_size == 1 and not self.evaluator.setup.base.partitions:
            return choice
        return self.in_buckets(choice, SMALLER_BUCKETS[-1])

    def in_buckets(self, choice: CandidateConfig, size: int) -> CandidateConfig:
        """The same choice in buckets of so many bytes, where the strategy leaves them open."""
        gather, reduce = self.strategy.gather_bytes or size, self.strategy.reduce_bytes or size
        return replace(choice, gather_bytes=gather, reduce_bytes=reduce)

    def recomputing(self, choice: CandidateConfig, level: Level, count: int) -> CandidateConfig:
        """The choice with the first `count` blocks raised to a level."""
        levels = dict(choice.recompute) | dict.fromkeys(self.order[:count], level)
        return replace(choice, recompute=tuple((b, levels[b]) for b in self.blocks))

    def mix(self, low: CandidateConfig, high: CandidateConfig) -> Candidate | None:
        """The fewest blocks of the higher of two stages with which a choice fits."""
        if self.fits(self.look(low)) or not self.fits(self.look(high)):
            return None
        stages = (dict(low.zero_stages), dict(high.zero_stages))

        def raised(count: int) -> CandidateConfig:
            chosen = {b: stages[i < count][b] for i, b in enumerate(self.order)}
            return replace(low, zero_stages=tuple((b, chosen[b]) for b in self.blocks))

        return self.least(raised)

    @property
    def order(self) -> list[str]:
        """The blocks in the order in which they are raised: repeated ones, then the rest."""
        return [*(b for b in self.blocks if b), ""]

    def least(self, raised: Callable[[int], CandidateConfig]) -> Candidate:
        """The smallest count that fits; the largest is known to, and none is known not to.

        Bytes fall nearly in proportion to the count, so it is looked for where a line between the
        nearest counts on both sides meets the cap, and behind that in the middle.
        """
        assert self.cap is not None
        low, high, straight = 0, len(self.order), True
        while high - low > 1 and self.evaluator.setup.deadline():
            over, under = (self.needed(raised(count)) - self.cap for count in (low, high))
            guess = low + math.ceil((high - low) * over / max(1, over - under))
            count = min(max(guess, low + 1), high - 1) if straight else (low + high) // 2
            before = high - low
            if self.needed(raised(count)) <= self.cap:
                high = count
            else:
                low = count
            straight = not straight if high - low > before // 2 else straight
        return self.look(raised(high))

    def needed(self, choice: CandidateConfig) -> int:
        """The bytes that a choice needs."""
        return self.look(choice).prediction.needed_bytes

    def tune(self, best: Candidate) -> Candidate:
        """Tries other sizes of buckets on the winner, and collectives scheduled one by one."""
        found = self.resized(best, LARGER_BUCKETS)
        if found is best:
            found = self.resized(best, SMALLER_BUCKETS)
        routes = [found.config]
        if self.strategy.hierarchical is None and self.evaluator.setup.base.levels:
            routes.append(replace(found.config, hierarchical=True))
        options = [self.look(route) for route in routes]
        if self.strategy.prefetch is None:
            options += [item for route in routes for item in self.scheduled(route)]
        found = self.best([found, *options]) or found
        return self.compress(found)

    def resized(self, best: Candidate, sizes: Iterable[int]) -> Candidate:
        """Other sizes of buckets, one after the other, as long as each is faster."""
        for size in sizes:
            other = self.look(self.in_buckets(best.config, size))
            if (found := self.best([best, other])) is best:
                break
            best = found or best
        return best

    def scheduled(self, choice: CandidateConfig) -> Iterator[Candidate]:
        """The same with collectives scheduled one by one: with less gathered ahead if it must."""
        yield (free := self.look(replace(choice, scheduled=True)))
        if not self.fits(free):
            yield self.look(replace(choice, scheduled=True, prefetch_budget_bytes=0))

    def compress(self, best: Candidate) -> Candidate:
        """Tries the methods that are allowed on all buckets, then on the last ones alone.

        The backward hides the earlier ones, if any.
        """
        buckets = len(best.plan.buckets.reduce)
        if self.strategy.compress is not None or not buckets:
            return best
        for method in map(compression_of, self.strategy.lossy):
            parts = dict.fromkeys(-(-buckets * share // 4) for share in (4, 3, 2, 1))
            mixtures = (("",) * (buckets - count) + (method,) * count for count in parts)
            tried = [self.look(replace(best.config, compress=mixture)) for mixture in mixtures]
            best = self.best([best, *tried]) or best
        return best

    def runners_up(self, best: Candidate) -> tuple[RunnerUp, ...]:
        """What else was looked at, fastest first, with the reason why it lost."""
        distinct = {_what_runs(best): best}
        for item in self.seen.values():
            distinct.setdefault(_what_runs(item), item)
        others = [item for item in distinct.values() if item is not best]
        fitting = sorted((i for i in others if self.fits(i)), key=_step_s)
        larger = sorted((i for i in others if not self.fits(i)), key=_step_s)
        room = RUNNERS_UP - min(len(larger), LARGER)
        return tuple(
            RunnerUp.of(str(item.config), item.prediction, self.why_lost(item, best))
            for item in (*fitting[:room], *larger[: RUNNERS_UP - len(fitting[:room])])
        )

    def why_lost(self, item: Candidate, best: Candidate) -> str:
        if self.cap is not None and not self.fits(item):
            return f"needs {human_bytes(item.prediction.needed_bytes - self.cap)} more than the cap"
        if item.prediction.step_s <= best.prediction.step_s:
            more = item.prediction.needed_bytes - best.prediction.needed_bytes
            return f"as fast, needs {human_bytes(more)} more"
        return slower(item.prediction, best.prediction)

    def with_rates(self, plan: Plan, choice: CandidateConfig) -> Plan:
        """The plan with what it, and the fastest that divides otherwise, take over other links."""
        cost = plan.prediction
        assert cost is not None
        if not cost.communication_s or cost.step_s > HOPELESS * self.incumbent_s:
            return plan
        items = (item for item in self.seen.values() if self.fits(item))
        others = [item for item in items if item.plan.zero_stages != plan.zero_stages]
        if not others and math.isinf(self.incumbent_s):
            return plan  # there is nothing that could win
        priced = replace(cost, at_rates=sweep_bandwidth(self.evaluator, choice))
        plan = replace(plan, prediction=priced)
        if not others:
            return plan
        rival = min(others, key=_step_s)
        rates, name = sweep_bandwidth(self.evaluator, rival.config), str(rival.config)
        runners_up = (
            replace(other, at_rates=rates) if other.name == name else other
            for other in plan.runners_up
        )
        return replace(plan, runners_up=tuple(runners_up))

    def nothing_fits(self) -> OutOfMemoryError:
        assert self.cap is not None
        smallest = min(self.seen.values(), key=lambda item: item.prediction.needed_bytes)
        short = smallest.prediction.needed_bytes - self.cap
        memory = smallest.prediction.memory
        return OutOfMemoryError(
            f"nothing fits under {human_bytes(self.cap)} per rank: the smallest plan "
            f"({smallest.plan.name}) needs {human_bytes(short)} more ({short} bytes). Its peak is "
            f"{memory_text(memory)}.",
            short,
            memory,
            cap=self.cap,
        )


def _step_s(item: Candidate) -> float:
    return item.prediction.step_s


def _least_s(item: Candidate) -> float:
    """What no other buckets and no other schedule of the same work go below."""
    return item.prediction.step_s - item.prediction.exposed_s


def _what_runs(item: Candidate) -> tuple[object, ...]:
    """What distinguishes a plan from others once buckets are filled."""
    plan = item.plan
    several = any(map(len, (plan.buckets.gather[1:], plan.buckets.regather[1:])))
    sums = tuple(partition.bucket_bytes for partition in plan.partitions)
    return (
        plan.zero_stages,
        plan.recompute,
        plan.buckets,
        plan.compressions,
        plan.levels,
        sums,
        plan.prefetch if several else 0,
        plan.overlaps,
    )


def _levels(blocks: Sequence[str], level: Level) -> tuple[tuple[str, Level], ...]:
    return tuple((block, level) for block in blocks)
