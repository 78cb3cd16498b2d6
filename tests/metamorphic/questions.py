"""Questions to the planner: a model, a mesh and a cluster, with evaluators kept for all checks."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture.batch_slices import CaptureCache, capture_of_rank
from autopar.core.ir.graph import TrainingGraph
from autopar.core.plan.strategy import Strategy
from autopar.cost_model.cluster.cluster import Cluster
from autopar.planner.evaluate.candidate import Candidate, CandidateConfig, default_config
from autopar.planner.evaluate.evaluator import Evaluator, SpmdEvaluator
from autopar.planner.machine import known_machine
from autopar.planner.problem import PlanningProblem
from autopar.planner.search.build_evaluator import build_evaluator
from autopar.planner.search.pipeline_search import open_pipelines
from tests.planner.blocks import Experts, GPTBlock, LlamaBlock, T5Block
from tests.planner.problems import problem_of

HEADS = 4
KINDS: dict[str, Callable[[int], nn.Module]] = {
    "gpt": lambda width: GPTBlock(width, HEADS),
    "llama": lambda width: LlamaBlock(width, HEADS, 2),
    "t5": lambda width: T5Block(width, HEADS),
    "experts": lambda width: Experts(width, 8, 16),
}


class Tower(nn.Module):
    """Blocks of a kind under one name, and a product that is registered first or last."""

    def __init__(self, question: "Question") -> None:
        super().__init__()
        width, name = question.width, question.name
        if question.head_first:
            self.head = nn.Linear(width, width, bias=False)
        blocks = (KINDS[question.kind](width) for _ in range(question.depth))
        self.add_module(name, nn.ModuleList(blocks))
        if not question.head_first:
            self.head = nn.Linear(width, width, bias=False)
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        for block in self.get_submodule(self.name):  # type: ignore[attr-defined]
            x = block(x)
        return self.head(x).square().mean()


@dataclass(frozen=True)
class Question:
    """A model and its batch, on a mesh of a cluster."""

    kind: str
    width: int
    depth: int
    rows: int
    length: int
    cluster: str = "dgx-h100"
    nodes: int = 1
    axes: tuple[tuple[str, Any], ...] = ()
    name: str = "blocks"
    head_first: bool = False
    precision: str | None = None

    @staticmethod
    def drawn(seed: int, **fields: Any) -> "Question":
        """A random model, on a random cluster."""
        draw = random.Random(seed)
        question = Question(
            kind=draw.choice(["gpt", "llama", "t5"]),
            width=64 * draw.randint(1, 3),
            depth=2,
            rows=16 * draw.randint(1, 2),
            length=32 * draw.randint(1, 4),
            cluster=draw.choice(["dgx-a100", "dgx-h100", "dgx-b200"]),
        )
        return replace(question, **fields)

    @property
    def strategy(self) -> Strategy:
        return Strategy(**dict(self.axes))

    @property
    def ranks(self) -> int:
        return Cluster.named(self.cluster, self.nodes).world_size

    @property
    def problem(self) -> PlanningProblem:
        problem = problem_of(
            model_of(self)[0],
            self.strategy,
            world_size=self.ranks,
            cluster=Cluster.named(self.cluster, self.nodes),
            comm_backend="nccl",
        )
        return replace(problem, precision=self.precision, device=torch.device("meta"))

    @property
    def graph(self) -> TrainingGraph:
        model, x, captures = model_of(self)
        micro_batches = self.strategy.micro_batches or 1
        autocast = None if self.precision is None else getattr(torch, self.precision)
        return capture_of_rank(
            model, (x,), 0, self.problem.dp_size, "global", autocast, None, micro_batches, captures
        )

    def config(self, **choices: Any) -> CandidateConfig:
        """ZeRO stage and recomputation of all blocks, and other fields of a configuration."""
        blocks, strategy = self.problem.blocks, replace(self.strategy, zero=None)
        config = default_config(strategy, blocks, choices.pop("zero", 0))
        level = choices.pop("recompute", "none")
        return replace(config, recompute=tuple((block, level) for block in blocks), **choices)

    def candidate(self, **choices: Any) -> Candidate:
        """The plan with these choices, and its prediction."""
        return _candidate(self, self.config(**choices))


@cache
def _model(key: Question) -> tuple[nn.Module, Tensor, CaptureCache]:
    with torch.device("meta"):
        return Tower(key), torch.empty(key.rows, key.length, key.width), {}


def model_of(question: Question) -> tuple[nn.Module, Tensor, CaptureCache]:
    """The model, its batch, and captures that questions on any mesh or cluster share."""
    return _model(replace(question, cluster="", nodes=1, axes=()))


@cache
def evaluator_of(question: Question) -> Evaluator:
    """The evaluator of a question, kept for all its configurations."""
    problem = question.problem
    spmd: SpmdEvaluator = build_evaluator(problem, question.graph, known_machine(problem, 1))
    if not question.strategy.pipelined:
        return spmd
    return next(open_pipelines(spmd, question.strategy, question.strategy.micro_batches or 1))


@cache
def _candidate(question: Question, config: CandidateConfig) -> Candidate:
    return evaluator_of(question).evaluate(config)
