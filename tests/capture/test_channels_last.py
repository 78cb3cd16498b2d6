"""Convolutions of channels-last weights stay channels-last, whose weights are stored contiguous."""

import copy

import pytest
import torch
from torch import nn

from autopar.capture.batch_slices import capture_of_rank
from autopar.capture.channels_last import mark_channels_last
from autopar.runtime.parameters.distribute import make_contiguous

aten = torch.ops.aten


@pytest.mark.parametrize("dims", [2, 3])
def test_a_plan_and_a_run_see_the_same_format(dims: int) -> None:
    """Weights are channels-last while a plan is made without ranks, and contiguous at a run."""
    convolution = (nn.Conv2d, nn.Conv3d)[dims - 2]
    wanted = (torch.channels_last, torch.channels_last_3d)[dims - 2]
    plain = nn.Sequential(convolution(3, 4, 3), nn.ReLU(), convolution(4, 2, 3))
    planned = copy.deepcopy(plain).to(memory_format=wanted)
    run = copy.deepcopy(planned)
    mark_channels_last(run)
    make_contiguous(run)
    x = torch.randn(4, 3, *[7] * dims)
    graphs = [capture_of_rank(copy.deepcopy(m), (x,), 0, 2) for m in (plain, planned, run)]
    assert str(graphs[1]) == str(graphs[2]) != str(graphs[0])
    results = [n for n in graphs[2].calls() if n.target is aten.convolution.default]
    assert len(results) == 2
    for node in results:
        assert node.meta["val"].is_contiguous(memory_format=wanted)
        assert not node.meta["val"].is_contiguous()
