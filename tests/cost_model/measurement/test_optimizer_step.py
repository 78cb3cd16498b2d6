import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from autopar.cost_model.curves.curve import Curve
from autopar.cost_model.kernels.roofline import Rates, Roofline
from autopar.cost_model.measurement.optimizer_step import SIZES, UpdateCost, measure_update


def test_each_parameter_costs_by_its_size():
    cost = UpdateCost(Curve((100, 10_000), (1e-5, 1e-3)), 1e-6, 1e-4, "measured today")
    plain = cost.seconds([100, 1000], dtensors=False)
    assert plain.seconds == pytest.approx(1e-5 + 1e-4 + 2e-6)
    assert plain.kind == "measured"
    wrapped = cost.seconds([100, 1000], dtensors=True)
    assert wrapped.seconds == pytest.approx(plain.seconds + 2e-4)


def test_what_is_modelled_by_rates_that_jump_never_falls():
    jump = Rates((1e3, 2e3), (1e6, 1e8))
    cost = UpdateCost.modelled(replace(Roofline.default("cpu", 1), streams=jump))
    assert list(cost.curve.seconds) == sorted(cost.curve.seconds)


def test_measures_any_optimizer():
    for optimizer in (torch.optim.AdamW, lambda p: torch.optim.SGD(p, lr=0.1)):
        cost = measure_update(optimizer, torch.device("cpu"), None)
        assert cost.per_gradient > 0
        assert cost.curve.bytes == tuple(4 * numel for numel in SIZES)
        many, large = (cost.seconds(s, dtensors=False).seconds for s in ([4], [2**24]))
        assert 0 < many < large


class Waiting(torch.optim.SGD):
    """Waits for a core 50 ms a step; the step itself takes less than 1 ms."""

    def step(self, closure: Any = None) -> Any:
        time.sleep(0.05)
        return super().step(closure)


def test_waits_for_a_core_do_not_count_where_ranks_share_cores():
    alone, shared = (
        measure_update(lambda p: Waiting(p, lr=0.1), torch.device("cpu"), None, shares_cores)
        for shares_cores in (False, True)
    )
    small = [4 * SIZES[0]]
    assert shared.seconds(small, dtensors=False).seconds < 1e-3
    assert alone.seconds(small, dtensors=False).seconds > 5e-3
