"""Why compute waits, on graphs of which every second is known."""

import pytest

from autopar.core.exposure import CAUSES, by_cause, worst
from autopar.core.ir.graph import TrainingGraph
from autopar.core.ir.roles import Output, Parameter
from tests.cost_model.simulator.test_step import APART, BYTES, HALVED, step
from tests.cost_model.sketch import Sketch, aten, c10d

LINK, MEMORY, DEPENDENCE = CAUSES


def one(order: str, copied: bool = False) -> TrainingGraph:
    """The sum over dp of sin(x), beside cos(x): `order` says when it is made, issued, waited for.

    s: sin, i: issue, c: cos, w: wait.
    """
    g = Sketch(dp=2)
    x = g.take(Parameter("w"), BYTES // 4)
    made = {}
    for letter in order:
        match letter:
            case "s":
                made["s"] = g.call(aten.sin.default, x)
            case "i":
                sent = made["s"]
                if copied:
                    sent = g.call(aten.exp.default, sent)
                    sent.meta["of"] = "it"
                made["i"] = g.call(c10d.all_reduce.default, sent, "sum", "dp")
                made["i"].meta |= {"of": "it", "block": "blocks.0"}
            case "c":
                made["c"] = g.call(aten.cos.default, x)
            case "w":
                made["w"] = g.call(c10d.wait_tensor.default, made["i"])
    return g.give({Output(0): g.call(aten.add.Tensor, made["w"], made["c"])})


@pytest.mark.parametrize(
    ("order", "seconds"),
    [
        ("siwc", (0, 0, 2)),  # needed at once
        ("sicw", (0, 0, 1.5)),  # half a second is hidden
        ("sciw", (0, 0.5, 1.5)),  # half a second could have been
    ],
)
def test_what_is_needed_at_once_and_what_was_held_back(order, seconds):
    for copied in (False, True):  # copies belong to the collective: it waits for what they read
        (found,) = step(one(order, copied), APART, sin=1.0, cos=0.5).exposures
        parts = (found.link_s, found.memory_s, found.dependence_s)
        assert parts == pytest.approx(seconds)
        assert (found.exposed_s, found.seconds, found.block) == (sum(seconds), 2.0, "blocks.0")


def two(axis: str) -> TrainingGraph:
    """Two all-reduces issued one behind the other, the second one needed first."""
    g = Sketch(dp=2, tp=2)
    x, y = (g.take(Parameter(name), BYTES // 4) for name in "xy")
    issued = [g.call(c10d.all_reduce.default, n, "sum", a) for n, a in ((x, "dp"), (y, axis))]
    z = g.call(aten.cos.default, x)
    late, early = (g.call(c10d.wait_tensor.default, n) for n in reversed(issued))
    return g.give({Output(0): g.call(aten.add.Tensor, late, early), Output(1): z})


def test_what_queues_or_shares_a_link_says_so():
    for axis in ("dp", "tp"):
        result = step(two(axis), APART, cos=1.0)
        (second, first) = result.exposures
        assert (second.link_s, second.dependence_s) == pytest.approx((2.0, 1.0))  # ends at 4
        assert first.exposed_s == 0.0
        assert worst(result.exposures, 5) == (second,)
        assert by_cause(result.exposures) == pytest.approx({LINK: 2, MEMORY: 0, DEPENDENCE: 1})


def test_what_would_have_queued_was_not_held_back():
    """The second is issued when the first has come, which it would have waited for anyhow."""
    g = Sketch(dp=2)
    x, y = (g.take(Parameter(name), BYTES // 4) for name in "xy")
    first = g.call(c10d.all_reduce.default, x, "sum", "dp")
    done = g.call(c10d.wait_tensor.default, first)
    z = g.call(aten.sin.default, done)
    second = g.call(c10d.all_reduce.default, y, "sum", "dp")
    come = g.call(c10d.wait_tensor.default, second)
    result = step(g.give({Output(0): g.call(aten.add.Tensor, come, z)}), APART, sin=0.5)
    assert [item.exposed_s for item in result.exposures] == pytest.approx([2.0, 2.0])
    assert result.exposures[1].by_cause == pytest.approx({LINK: 1.5, MEMORY: 0.5, DEPENDENCE: 0.0})


def test_causes_add_up_to_what_compute_waits():
    for graph in (two("dp"), two("tp"), one("sciw")):
        result = step(graph, HALVED, sin=0.3, cos=0.7)
        exposed = sum(item.exposed_s for item in result.exposures)
        assert exposed == pytest.approx(sum(result.waits.values()))
        assert sum(by_cause(result.exposures).values()) == pytest.approx(exposed)
