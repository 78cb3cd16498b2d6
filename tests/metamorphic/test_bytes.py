"""Bytes and operations of plans beside closed formulas, and how they grow with the model."""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from autopar.core.ir.graph import ParameterInfo
from autopar.core.ir.messages import collective_of
from autopar.core.plan.layout import Layout
from autopar.core.plan.plan import Plan
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.collectives import Transfer
from autopar.cost_model.memory.optimizer_memory import optimizer_state_ratio
from autopar.planner.evaluate.evaluator import SpmdEvaluator
from autopar.planner.search.state_bytes import least_state_bytes
from autopar.planner.work import work_of
from tests.metamorphic.questions import Question, evaluator_of

FLOAT = 4
"""Bytes of a float32."""
RECORDS = 64
"""Most bytes of the losses and counts that ranks exchange."""
WIDTHS = pytest.mark.parametrize("width", [64, 192])


def gpt(width: int, **fields: Any) -> Question:
    return replace(Question("gpt", width, 2, 16, 64), **fields)


def whole_bytes(plan: Plan) -> int:
    return sum(size for _, size in plan.parameter_bytes)


def activation_bytes(question: Question) -> int:
    """Bytes of the rows between two blocks, on one rank of the data."""
    numel = question.rows * question.length * question.width
    return FLOAT * numel // question.problem.dp_size


def messages(question: Question) -> Counter[tuple[str, int]]:
    """Number of collectives of each kind and size."""
    evaluator = evaluator_of(question)
    assert isinstance(evaluator, SpmdEvaluator)
    graph = evaluator.lowered(question.config())
    sent = (Transfer.of(n, graph.axes, 8) for n in graph.calls() if collective_of(n) is not None)
    return Counter((transfer.collective, transfer.nbytes) for transfer in sent)


# -- messages --------------------------------------------------------------------------------------


@WIDTHS
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_gradients_are_reduced_once(width: int, stage: int) -> None:
    """2 (n - 1) / n of all gradients: an all-reduce, or a reduce-scatter and an all-gather."""
    plan = gpt(width).candidate(zero=stage).plan
    expected = 2 * 7 / 8 * whole_bytes(plan)
    assert dict(plan.sent_bytes)["dp"] == pytest.approx(expected, abs=RECORDS)


@WIDTHS
@pytest.mark.parametrize(("level", "biases"), [("none", 9), ("full", 1)])
def test_zero_3_gathers_twice_and_reduces_once(width: int, level: str, biases: int) -> None:
    """3 (n - 1) / n of all parameters, less what the backward does not read again.

    That is the head, whose backward follows at once, and biases: of four products of a block, or of
    its last one, where the others are computed again.
    """
    question = gpt(width)
    plan = question.candidate(zero=3, recompute=level).plan
    unread = FLOAT * (width**2 + question.depth * biases * width)
    expected = 7 / 8 * (3 * whole_bytes(plan) - unread)
    assert dict(plan.sent_bytes)["dp"] == pytest.approx(expected, abs=RECORDS)


@pytest.mark.parametrize("depth", [1, 2])
def test_tensor_parallelism_reduces_four_activations_a_block(depth: int) -> None:
    """After attention and MLP, and before both in the backward (Shoeybi et al. 2019); one head."""
    question = Question("gpt", 2048, depth, 4, 128, axes=(("tp", 2),))
    plan, size = question.candidate().plan, activation_bytes(question)
    count = 4 * depth + 1
    assert messages(question)["all_reduce", size] == count
    assert dict(plan.sent_bytes)["tp"] == pytest.approx(count * size, abs=RECORDS)
    layout = Layout(plan)
    held = sum(size * layout.share_of(name) for name, size in plan.parameter_bytes)
    assert dict(plan.sent_bytes)["dp"] == pytest.approx(2 * 3 / 4 * held, abs=RECORDS)


@pytest.mark.parametrize(("depth", "micro_batches"), [(3, 1), (3, 4), (4, 2)])
def test_a_pipeline_sends_the_rows_between_two_blocks(depth: int, micro_batches: int) -> None:
    """Activations of each micro-batch to the next stage, and as many gradients back."""
    axes = (("pp", 2), ("micro_batches", micro_batches), ("schedule", "1f1b"))
    question = gpt(128, depth=depth, axes=axes)
    first, last = question.candidate().prediction.stages
    size = activation_bytes(question) // micro_batches
    assert (first.sent_bytes, last.returned_bytes) == (size, size)
    assert (first.returned_bytes, last.sent_bytes) == (0, 0)
    assert dict(question.candidate().plan.sent_bytes)["pp"] == micro_batches * size


def test_a_ring_of_sequences_sends_in_proportion_to_their_length() -> None:
    """Beside the gradients, which it reduces once: keys and values pass every rank."""
    beside = []
    for length in (2048, 4096):
        axes = (("cp", 2), ("ring_attention", True))
        question = Question("gpt", 256, 1, 4, length, axes=axes)
        plan = question.candidate().plan
        beside.append(dict(plan.sent_bytes)["cp"] - whole_bytes(plan))
        keys_and_values = 2 * activation_bytes(question) // 2
        # Keys and values go round in both directions of a block, and their gradients go back.
        assert beside[-1] >= question.depth * 3 * keys_and_values
    assert beside[1] == pytest.approx(2 * beside[0], rel=1e-3)


def test_experts_exchange_their_slots() -> None:
    """An all-to-all to the experts and one back, forward and backward; the ends need fewer."""
    question = Question("experts", 1024, 2, 8, 64, axes=(("ep", 8),))
    slots = question.rows * 8 * 16 * question.width * FLOAT // 8
    sent = messages(question)["all_to_all", slots]
    assert 4 * question.depth - 2 <= sent <= 4 * question.depth
    # No expert's gradient leaves its rank.
    plan = question.candidate().plan
    assert dict(plan.sent_bytes)["ep"] < 0.1 * whole_bytes(plan)


# -- states ----------------------------------------------------------------------------------------


@WIDTHS
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_states_are_those_of_the_shards(width: int, stage: int) -> None:
    """4 bytes of a parameter and 8 of AdamW's states, by the share that a rank keeps."""
    question = gpt(width)
    plan, found = question.candidate(zero=stage).plan, question.candidate(zero=stage).prediction
    layout, parameters = Layout(plan), question.problem.parameters
    held = sum(size * layout.share_of(name) for name, size in plan.parameter_bytes)
    # torch's allocator rounds each tensor up to 512 bytes.
    blocks = 512 * len(parameters)
    assert held <= found.memory["parameters"] <= held + blocks
    states = 2 * (held if stage else whole_bytes(plan))
    assert states <= found.memory["optimizer"] <= states + 3 * blocks


def test_states_follow_the_formulas_of_zero() -> None:
    """16 bytes of an element whole; 4 of them, 8 and all are divided (Rajbhandari et al. 2020)."""
    draw = random.Random(0)
    for _ in range(50):
        ranks = 2 ** draw.randint(1, 6)
        shapes = [(64 * draw.randint(1, 64), draw.randint(1, 64)) for _ in range(5)]
        infos = [ParameterInfo(str(i), s, torch.float32, True, "") for i, s in enumerate(shapes)]
        numel = sum(rows * columns for rows, columns in shapes)

        def least(stage: int, ranks: int = ranks, infos: Any = infos) -> float:
            return least_state_bytes(infos, {"": stage}, ranks, 2.0)

        assert least(0) == 16 * numel
        assert least(1) == least(2) == pytest.approx((4 + 12 / ranks) * numel)
        assert least(3) == pytest.approx(16 / ranks * numel)


def test_optimizers_keep_what_their_definitions_say() -> None:
    """Tensors of a parameter's size: Adam two, momentum one, plain SGD none."""
    for expected, optimizer in (
        (2.0, torch.optim.AdamW),
        (1.0, lambda parameters: torch.optim.SGD(parameters, momentum=0.9)),
        (0.0, torch.optim.SGD),
    ):
        assert optimizer_state_ratio(optimizer) == expected


# -- work and growth -------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "length"), [(64, 64), (128, 32), (192, 128)])
def test_floating_point_operations_are_those_of_the_formula(width: int, length: int) -> None:
    """72 b l w^2 of products and 14 b l^2 w of attention a block: 2 forward, 5 backward."""
    question = gpt(width, length=length)
    tokens, ranks = question.rows * length, question.problem.dp_size
    cluster = Cluster.named(question.cluster, 1)
    work = work_of(question.graph, ranks, cluster, "float32")
    products = 3 * 2 * tokens * (question.depth * 12 + 1) * width**2
    attention = question.depth * (2 + 5) * 2 * tokens * length * width
    assert work.flops == pytest.approx(products + attention)
    assert work.rows == question.rows


@pytest.mark.parametrize("kind", ["gpt", "t5"])
def test_twice_the_rows_are_twice_the_work(kind: str) -> None:
    """Operations and saved bytes double; parameters and messages of gradients do not change."""
    one = Question(kind, 128, 1, 8, 64)
    two = replace(one, rows=16)
    cluster = Cluster.named(one.cluster, 1)
    flops = [work_of(q.graph, 8, cluster, "float32").flops for q in (one, two)]
    assert flops[1] == pytest.approx(2 * flops[0])
    few, many = (question.candidate() for question in (one, two))
    assert many.plan.sent_bytes == few.plan.sent_bytes
    assert many.prediction.memory["parameters"] == few.prediction.memory["parameters"]
    took = few.prediction.compute_s, many.prediction.compute_s
    assert took[0] <= took[1] <= 2 * took[0]


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_each_further_block_adds_the_same(kind: str) -> None:
    """Parameters, states, bytes on links, compute: a line through one, two and three blocks."""
    rows = []
    for depth in (1, 2, 3):
        found = Question(kind, 128, depth, 8, 64).candidate()
        cost = found.prediction
        sizes = cost.memory["parameters"], cost.memory["optimizer"]
        sent = dict(found.plan.sent_bytes)["dp"]
        rows.append((*sizes, sent, cost.compute_s, cost.update_s))
    for one, two, three in zip(*rows, strict=True):
        assert three - two == pytest.approx(two - one, rel=0.03)
        assert two > one


def test_half_precision_saves_no_more_and_computes_no_more_slowly() -> None:
    """Autocast to bfloat16 on the same model, whose parameters stay in float32."""
    question = gpt(512)
    wide = question.candidate().prediction
    narrow = replace(question, precision="bfloat16").candidate().prediction
    assert narrow.compute_s <= wide.compute_s
    assert narrow.memory["parameters"] == wide.memory["parameters"]
    assert narrow.peak_bytes <= wide.peak_bytes
