"""Passes that users register, and those that training leaves out."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest

from autopar.core.ir.graph import TrainingGraph
from autopar.errors import PassError, StrategyError
from autopar.passes import register_pass
from autopar.passes.core.pass_base import Pass, PassResult
from autopar.passes.core.runner import apply_pass, run_passes
from autopar.passes.pipeline import build_pass_pipeline
from autopar.passes.registration import DISABLE, disabled_passes, pass_settings
from tests.passes.golden import two_layers


@dataclass(frozen=True)
class CountNodes(Pass):
    """Notes the number of operators."""

    label: str = "nodes"

    def __call__(self, graph: TrainingGraph) -> PassResult:
        note = f"{sum(1 for _ in graph.calls())} {self.label}"
        return PassResult(replace(graph, notes=(*graph.notes, note)))


@contextmanager
def registered(item: Pass, **where: str) -> Iterator[None]:
    handle = register_pass(item, **where)
    try:
        yield
    finally:
        handle.remove()


def names() -> list[str]:
    return list(build_pass_pipeline(two_layers().plan(3), 0, "gloo").names)


@pytest.mark.parametrize(
    ("where", "neighbours"),
    [
        ({"before": "schedule_overlap"}, ("bucket_collectives", "schedule_overlap")),
        ({"after": "shard_parameters"}, ("shard_parameters", "cast_before_gather")),
        ({"before": "assign_batch_axis"}, (None, "assign_batch_axis")),
        ({}, ("lower_collectives", None)),
    ],
    ids=str,
)
def test_a_registered_pass_runs_beside_its_neighbour(
    where: dict[str, str], neighbours: tuple[str | None, str | None]
) -> None:
    plain = names()
    with registered(CountNodes(), **where):
        around = [None, *names(), None]
    at = around.index("count_nodes")
    assert (around[at - 1], around[at + 1]) == neighbours
    assert around.count("count_nodes") == 1
    assert names() == plain


def test_a_pipeline_without_the_neighbour_leaves_the_pass_out() -> None:
    with registered(CountNodes(), after="partition_axis"):
        assert "count_nodes" not in names()


def test_registered_passes_run_in_the_order_of_registration() -> None:
    it = two_layers()
    with registered(CountNodes("first")), registered(CountNodes("second")):
        graph = run_passes(it.graph(0), build_pass_pipeline(it.plan(0), 0, "gloo"))
        options = (
            "count_nodes(label='first')",
            "count_nodes(label='second')",
        )  # ranks compare them
        assert pass_settings() == ((), [(text, "", "") for text in options])
    assert [note.split()[1] for note in graph.notes] == ["first", "second"]


class Careless(Pass):
    """Returns the graph alone."""

    def __call__(self, graph: TrainingGraph) -> PassResult:
        return graph  # type: ignore[return-value]


def test_a_pass_returns_a_pass_result() -> None:
    with pytest.raises(PassError, match="careless returned TrainingGraph: return a PassResult"):
        apply_pass(Careless(), two_layers().graph(0))


class Undecorated(Pass):
    """No dataclass."""

    def __call__(self, graph: TrainingGraph) -> PassResult:
        return PassResult(graph)


@dataclass
class Mutable(Undecorated):
    """A dataclass whose options can change."""


def test_what_cannot_be_registered() -> None:
    for item in (Undecorated(), Mutable()):
        with pytest.raises(StrategyError, match=f"{type(item).__name__} is no frozen dataclass"):
            register_pass(item)
    with pytest.raises(StrategyError, match="give an instance of a subclass of Pass"):
        register_pass(CountNodes)  # type: ignore[arg-type]
    with pytest.raises(StrategyError, match="no pass is called 'overlap': choose from accumulate"):
        register_pass(CountNodes(), before="overlap")
    with pytest.raises(StrategyError, match="give one of them"):
        register_pass(CountNodes(), before="schedule_overlap", after="shard_parameters")


def test_disabled_passes_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert disabled_passes() == ()
    monkeypatch.setenv(DISABLE, "schedule_overlap, fuse_cross_entropy,")
    assert disabled_passes() == ("schedule_overlap", "fuse_cross_entropy")
    assert pass_settings() == (disabled_passes(), [])
