import torch

from autopar.core.ir.roles import Accumulated, Gradient, Parameter, Saved, Tangent
from autopar.passes.pipeline_parallel.accumulate_gradients import accumulate_gradients
from autopar.passes.split_forward_backward import split_forward_backward
from tests.passes.golden import two_layers
from tests.passes.simulated import run_ranks

NAMES = ("blocks.0.weight", "blocks.1.weight")


def test_gradients_are_added_in_place_once_computed() -> None:
    it = two_layers(ranks=1)
    split = split_forward_backward(it.graph(0))
    assert split.backward is not None
    ((saved),) = run_ranks([split.forward], [it.values(split.forward, 0)])
    graph = accumulate_gradients(split.backward)
    before = {name: torch.ones(it.parameters[name].shape, dtype=torch.float64) for name in NAMES}
    given = {r: v for r, v in saved.items() if isinstance(r, Saved)}
    given |= {Tangent(0): torch.ones((), dtype=torch.float64)}  # type: ignore[dict-item]
    (result,) = run_ranks([graph], [given | {Accumulated(n, True): t for n, t in before.items()}])  # type: ignore
    for name, total in before.items():
        assert result[Gradient(Parameter(name))] is total  # in place
        assert torch.equal(total, 1 + it.plain().gradients[name])
    added = [n for n in graph.calls() if "add_" in n.name]
    assert all(n.prev is n.args[1] for n in added)
    assert len(added) == len(NAMES)
