"""What is left of memory traffic where a compiler fuses small operators."""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture.batch_slices import capture_of_rank
from autopar.core.ir.graph import TrainingGraph
from autopar.core.ir.signature import moved_bytes, time_key
from autopar.cost_model.kernels.fusion import is_fused, traffic
from autopar.cost_model.kernels.timing import flops_of
from autopar.cost_model.measurement.operator_times import OperatorTimes
from autopar.cost_model.measurement.timing_context import Timing

ROWS, WIDTH = 16384, 512
VALUE = ROWS * WIDTH * 4


class Model(nn.Module):
    """Small operators before, between and around two products."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.one = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.two = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.sin().cos()
        y = self.two(F.gelu(self.one(self.norm(x))).neg())
        return (x + y).square().sum()


def graph() -> TrainingGraph:
    with torch.device("meta"):
        model, x = Model(), torch.zeros(ROWS, WIDTH)
    return capture_of_rank(model, (x,), 0, 1)


def named(found: TrainingGraph, name: str) -> torch.fx.Node:
    return next(n for n in found.calls() if n.name == name)


def test_what_is_read_and_made_inside_of_a_kernel_never_reaches_memory() -> None:
    found = graph()
    moved = traffic(found, "inductor")
    assert moved[named(found, "sin")].nbytes == VALUE  # read; what it makes cos reads at once
    assert named(found, "mm") not in moved
    assert is_fused(named(found, "add"), "inductor")
    # x + y lies behind two products, so x is read again there: no kernel spans them.
    assert moved[named(found, "add")].nbytes >= 2 * VALUE
    kernels = sum(each.first for each in moved.values())
    assert 3 <= kernels < len(moved)


def test_by_torchscript_norms_are_kernels_of_their_own() -> None:
    found = graph()
    norm = next(n for n in found.calls() if "native_layer_norm.default" in str(n.target))
    assert is_fused(norm, "inductor")
    assert not is_fused(norm, "ts")


def test_fused_operators_take_less() -> None:
    found = graph()
    times = OperatorTimes.load("NVIDIA A100-SXM4-80GB")
    fused = replace(times, backend="inductor").of(found)
    assert times.of(found) is times
    small = [n for n in found.calls() if "mm" not in n.name]
    seconds = [sum(t.seconds(n).seconds for n in small) for t in (times, fused)]
    assert 0.3 * seconds[0] < seconds[1] < 0.8 * seconds[0]


def test_a_running_device_fuses_too_whatever_its_operators_take_alone() -> None:
    found = graph()
    sin, product = named(found, "sin"), named(found, "mm")
    alone = {
        time_key(n): Timing(1.0, flops_of(n), moved_bytes(n), "2026-11-23") for n in (sin, product)
    }
    eager = replace(OperatorTimes.load("cpu", runs_on="cpu"), times=alone)
    assert eager.present
    fused = replace(eager, backend="inductor").of(found)
    assert eager.seconds(sin).seconds == eager.seconds(product).seconds == 1.0
    assert fused.seconds(sin).seconds < fused.seconds(product).seconds == 1.0
