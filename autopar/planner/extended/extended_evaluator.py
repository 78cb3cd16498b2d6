"""`ExtendedEvaluator`: figures of a whole model from few of its repeated blocks, by arithmetic.

Blocks of a kind that are configured alike add the same to every figure of a step: its times, bytes
and FLOPs. The peak of memory grows by its parts (`growth`). The model is lowered and simulated with
two blocks of each kind, and with a third. Blocks of a kind that are configured differently count in
proportion.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from autopar.core.plan.plan import Plan
from autopar.core.plan.prediction import Prediction, Work
from autopar.core.plan.recompute import Level
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.memory.growth import Bytes, MoreBlocks, grown_parts
from autopar.cost_model.memory.liveness import CATEGORIES
from autopar.planner.evaluate.candidate import Candidate, CandidateConfig
from autopar.planner.evaluate.evaluator import Evaluator
from autopar.planner.evaluate.setup import EvaluationSetup
from autopar.planner.extended.derivation import of_blocks

Figures = Mapping[tuple[str, str], float]
"""Figures that add up over blocks, by the field of a prediction and the key within."""

Class = tuple[int, Level, bool]
"""ZeRO stage, recomputation and offload of a block."""

SUMMANDS = ("compute_s", "exposed_s", "update_s", "idle_s")
"""Parts of a step that grow by themselves.

A bucket that a third block fills may end a wait. Extended over all blocks by its own difference, a
step was shorter than its computation.
"""

SCALARS = (*SUMMANDS, "communication_s", "node_bytes", "host_bytes")
GAPS = "gaps"
"""Bytes that the allocator reserves beside those of tensors, which hardly grow with the blocks."""

GROWN_GAPS = 0.03
"""Gaps that a whole model adds, as a fraction of its tensors' bytes; three in four add less.

Of 106 configurations of six models on A100 and H100, lowered whole. The median adds 0.01.
"""

MEMORY = ("around the forward's end", "towards the backward's end", "update")
"""Parts of a step, each with its own peak (see `growth`)."""

TABLES = ("waits", "causes", "provenance")


@dataclass(frozen=True)
class ReducedEvaluator:
    """Evaluator of a model with few blocks.

    Attributes:
        blocks: name in the whole model of each of its blocks.
        work: rows, tokens and FLOPs of its step.
        times: number of times that its figures recur, beside those of the fewest blocks.
    """

    evaluator: Evaluator
    blocks: Mapping[str, str]
    work: Work
    times: int


class ExtendedEvaluator(Evaluator):
    """Evaluator of a whole model that lowers reduced models only.

    Args:
        setup: setup whose plan and parameters are those of the whole model.
        kinds: names of the blocks of each kind.
        reduced: the model with few blocks of each kind, then with one more of some kinds in turn.
    """

    def __init__(
        self,
        setup: EvaluationSetup,
        kinds: Sequence[Sequence[str]],
        reduced: Sequence[ReducedEvaluator],
    ) -> None:
        super().__init__(setup)
        self.kinds, self.reduced = kinds, reduced
        self._uniform: dict[CandidateConfig, Figures] = {}

    def plan(self, config: CandidateConfig) -> Plan:
        plan = self.setup.draft(config)
        name = f"{plan.name}, {plan.pipeline}" if plan.pipeline is not None else plan.name
        return replace(plan, name=name, bucket_bytes=(config.gather_bytes, config.reduce_bytes))

    def evaluate(self, config: CandidateConfig) -> Candidate:
        figures = self._figures(config)
        tables: dict[str, dict[str, Any]] = {
            name: {} for name in (*SCALARS, *TABLES, *MEMORY, GAPS, "sent", "work")
        }
        for (field, key), value in figures.items():
            tables[field][key] = max(0.0, value)
        for name in (*MEMORY, "provenance", "sent"):
            tables[name] = {key: round(value) for key, value in tables[name].items()}
        scalars = {name: tables[name][""] for name in SCALARS}
        scalars["step_s"] = sum(scalars[name] for name in SUMMANDS)
        del scalars["idle_s"]
        scalars |= {n: round(value) for n, value in scalars.items() if n.endswith("_bytes")}
        # Unlike blocks are mixed within each part of the step. The mean of their peaks, which lie
        # in different parts, was 4 GiB too much for Mixtral.
        memory = max((tables[part] for part in MEMORY), key=lambda table: sum(table.values()))
        scalars["peak_bytes"] = sum(memory.values())
        context_bytes, gaps = self._context_bytes(config), tables[GAPS][""]
        if context_bytes:  # on a GPU
            gaps += GROWN_GAPS * scalars["peak_bytes"]
        scalars["reserved_bytes"] = scalars["peak_bytes"] + round(gaps)
        found: dict[str, Any] = scalars | {"memory": memory}
        found |= {name: tables[name] for name in TABLES}
        work = replace(self.reduced[0].work, **tables["work"])
        prediction = Prediction(**found, context_bytes=context_bytes, work=work)
        sent = tuple(sorted((axis, size) for axis, size in tables["sent"].items() if size))
        plan = self.plan(config)
        plan = replace(plan, sent_bytes=sent, notes=(*plan.notes, self._note()))
        return self.setup.candidate(config, plan, prediction)

    def _note(self) -> str:
        samples = [
            [sum(own in kind for own in item.blocks.values()) for kind in self.kinds]
            for item in self.reduced
        ]
        return of_blocks(self.kinds, samples)

    def seconds(self, config: CandidateConfig, clusters: Sequence[Cluster]) -> list[float]:
        """Step times on other clusters, all blocks being as the first of their kind."""
        found = [0.0] * len(clusters)
        for weight, classes in self._mixtures(config):
            few, *more = (self._seconds(item, classes, config, clusters) for item in self.reduced)
            few_s, *more_s = (self._busy_s(item, classes, config) for item in self.reduced)
            for index, base in enumerate(few):
                pairs = zip(self.reduced[1:], more, more_s, strict=True)
                grown = sum(max(own[index] - base, s - few_s) * it.times for it, own, s in pairs)
                found[index] += weight * (base + grown)
        return found

    def _busy_s(
        self, reduced: ReducedEvaluator, classes: Sequence[Class], config: CandidateConfig
    ) -> float:
        """Seconds of a step without waits, by which more blocks lengthen it on every cluster."""
        own = self._reduced_config(reduced, classes, config)
        cost = reduced.evaluator.evaluate(own).prediction
        return cost.compute_s + cost.update_s

    def _seconds(
        self,
        reduced: ReducedEvaluator,
        classes: Sequence[Class],
        config: CandidateConfig,
        clusters: Sequence[Cluster],
    ) -> list[float]:
        return reduced.evaluator.seconds(self._reduced_config(reduced, classes, config), clusters)

    def _context_bytes(self, config: CandidateConfig) -> int:
        _, classes = next(self._mixtures(config))
        own = self._reduced_config(self.reduced[0], classes, config)
        return self.reduced[0].evaluator.evaluate(own).prediction.context_bytes

    def _figures(self, config: CandidateConfig) -> Figures:
        total: Counter[tuple[str, str]] = Counter()
        for weight, classes in self._mixtures(config):
            for key, value in self._of_uniform(classes, config).items():
                total[key] += weight * value  # type: ignore[assignment]
        return total

    def _mixtures(self, config: CandidateConfig) -> Iterator[tuple[float, tuple[Class, ...]]]:
        """Classes of the blocks of each kind, and the share of blocks that are so."""
        zero, levels = dict(config.zero_stages), dict(config.recompute)
        counts = [
            Counter((zero[b], levels[b], b in config.offload) for b in kind) for kind in self.kinds
        ]
        for classes in product(*counts):
            weight = 1.0
            for kind, found, own in zip(self.kinds, counts, classes, strict=True):
                weight *= found[own] / len(kind)
            yield weight, classes

    def _of_uniform(self, classes: tuple[Class, ...], config: CandidateConfig) -> Figures:
        """Figures of the whole model if all blocks of a kind are of one class."""
        own = self._reduced_config(self.reduced[0], classes, config)
        if own not in self._uniform:
            configs = (self._reduced_config(item, classes, config) for item in self.reduced)
            pairs = zip(self.reduced, configs, strict=True)
            few, *more = (item.evaluator.evaluate(each) for item, each in pairs)
            total = self._summed(few, more)
            stage = min(stage for stage, *_ in classes)
            for part, table in zip(MEMORY, self._memory(few, more, config, stage), strict=True):
                total |= {(part, name): float(n) for name, n in zip(CATEGORIES, table, strict=True)}
            gaps = (
                each.prediction.reserved_bytes - each.prediction.peak_bytes for each in (few, *more)
            )
            # Gaps depend on the order of allocations, not on depth. Extended over the blocks, they
            # were up to 4.9 times those of the whole model.
            self._uniform[own] = {**total, (GAPS, ""): float(max(gaps))}
        return self._uniform[own]

    def _summed(self, few: Candidate, more: Sequence[Candidate]) -> dict[tuple[str, str], float]:
        """Figures that each block adds to."""
        base = figures_of(few, self.reduced[0].work)
        total = dict(base)
        for item, candidate in zip(self.reduced[1:], more, strict=True):
            own = figures_of(candidate, item.work)
            for key in {*base, *own}:
                block = max(0.0, own.get(key, 0.0) - base.get(key, 0.0))
                total[key] = total.get(key, 0.0) + block * item.times
        return total

    def _memory(
        self,
        few: Candidate,
        more: Sequence[Candidate],
        config: CandidateConfig,
        zero_stage: int,
    ) -> list[Bytes]:
        """Bytes of each category at the peak of each part of the step."""
        assert few.parts is not None
        samples = []
        for item, candidate in zip(self.reduced[1:], more, strict=True):
            assert candidate.parts is not None
            samples.append(MoreBlocks(candidate.parts, item.times))
        return grown_parts(few.parts, samples, zero_stage, most_bucket_bytes(config, zero_stage))

    def _reduced_config(
        self, reduced: ReducedEvaluator, classes: Sequence[Class], config: CandidateConfig
    ) -> CandidateConfig:
        return reduced_config(config, self.kinds, classes, reduced.evaluator, reduced.blocks)


def reduced_config(
    config: CandidateConfig,
    kinds: Sequence[Sequence[str]],
    classes: Sequence[Class],
    evaluator: Evaluator,
    names: Mapping[str, str],
) -> CandidateConfig:
    """The configuration of a reduced model, whose blocks of each kind are all of one class.

    `names` are those of its blocks in the whole model.
    """
    zero, levels = dict(config.zero_stages), dict(config.recompute)
    offloaded = set(config.offload)
    for kind, (stage, level, away) in zip(kinds, classes, strict=True):
        zero |= dict.fromkeys(kind, stage)
        levels |= dict.fromkeys(kind, level)
        offloaded = offloaded.union(kind) if away else offloaded.difference(kind)
    blocks = [(block, names[block]) for block in evaluator.setup.blocks]
    return replace(
        config,
        zero_stages=tuple((block, zero[name]) for block, name in blocks),
        recompute=tuple((block, levels[name]) for block, name in blocks),
        offload=tuple(block for block, name in blocks if name in offloaded),
    )


def most_bucket_bytes(config: CandidateConfig, zero_stage: int) -> int:
    """Most bytes of all buckets at one moment."""
    gathered = config.gather_bytes * (1 + config.prefetch) if zero_stage == 3 else 0
    return config.reduce_bytes + gathered


def figures_of(candidate: Candidate, work: Work) -> dict[tuple[str, str], float]:
    """Figures of a configuration of a reduced model, with its work."""
    cost = candidate.prediction
    found = {(name, ""): float(getattr(cost, name)) for name in SCALARS}
    for name in TABLES:
        found |= {(name, key): float(value) for key, value in getattr(cost, name).items()}
    found |= {("sent", axis): float(nbytes) for axis, nbytes in candidate.plan.sent_bytes}
    return found | {("work", name): getattr(work, name) for name in ("flops", "wide_flops")}
