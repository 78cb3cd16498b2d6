from functools import lru_cache

import pytest
import torch
from torch import fx

from autopar.passes.build import aten
from autopar.passes.checkpoint_activations import CheckpointActivations, kept_bytes
from autopar.passes.decompose_operators import DecomposeOperators
from autopar.passes.runner import run_passes
from tests.models import MODELS, to_dtype
from tests.passes.golden import two_layers
from tests.passes.parity import World, assert_parity


@lru_cache(maxsize=4)
def world(name: str, ranks: int = 2) -> World:
    case = MODELS[name]
    batch = to_dtype(case.batch(6, 0), torch.float64)
    return World(case.make().double(), batch, ranks, case.loss)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", ["gpt", "conv", "encdec", "moe", "odd"])
def test_what_a_compiler_is_given_equals_the_plain_model(name: str, stage: int) -> None:
    it = world(name)
    plan = it.plan(stage)
    assert_parity(it, it.lower(lambda rank: plan.passes(rank, "gloo", compiled=True)))


def test_backward_reads_the_normalised_activation_of_the_forward() -> None:
    graph = run_passes(world("gpt").graph(0), [DecomposeOperators()])
    targets = {node.target for node in graph.calls()}
    assert not targets & {aten.native_layer_norm.default, aten.native_layer_norm_backward.default}
    shared = [n for n in graph.calls() if n.target is aten.rsqrt.default and _is_read_late(n)]
    assert shared  # its own decomposition would take the norm's statistics again


def test_equal_operators_are_written_once() -> None:
    before = world("gpt").graph(0)
    after = run_passes(before, [DecomposeOperators(), DecomposeOperators()])
    written = [
        (n.target, n.args, tuple(n.kwargs.items()), n.meta["phase"])
        for n in after.calls()
        if n.all_input_nodes and getattr(n.target, "namespace", "") == "aten"
    ]
    assert len(set(map(repr, written))) == len(written)


def test_fused_operators_are_computed_again_inside_their_block() -> None:
    graph = run_passes(world("gpt").graph(0), [DecomposeOperators()])
    kept = run_passes(graph, [CheckpointActivations("none")])
    fused = run_passes(graph, [CheckpointActivations("none", fuses=True)])
    assert kept_bytes(fused) < 0.75 * kept_bytes(kept)
    again = [node for node in fused.calls() if "recomputed" in node.meta]
    assert again
    assert not any(n.target in (aten.mm.default, aten.sum.dim_IntList) for n in again)


def test_a_graph_of_simple_operators_stays_as_it_is() -> None:
    before = two_layers(1).graph(0)
    after = run_passes(before, [DecomposeOperators()])
    count = sum(1 for _ in after.calls())
    assert count <= sum(1 for _ in before.calls()) + 4  # tanh_backward is products and a sum


def _is_read_late(node: fx.Node) -> bool:
    return node.meta["phase"] == "forward" and any(
        user.meta.get("phase") == "backward" for user in node.users
    )
