"""Offload to host memory on emulated streams has the plain model's numbers."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import autopar
from autopar.cost_model.memory.optimizer_memory import OptimizerMemory
from benchmarks.offload import exactness
from tests.harness.emulated_streams import emulated_streams

CASES = [
    ("gpt", "single", "all"),
    ("dropout", "single", "activations"),
    ("gpt", "zero3", "all"),
    ("conv", "zero1", "activations+states"),
    ("gpt", "tp2", "parameters"),
    ("gpt", "pp2", "activations"),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_the_plain_models_numbers(case: tuple[str, str, str]) -> None:
    row = exactness.measure(*case, None)
    assert row.error is None
    assert row.is_exact, row


def states_of(folder: Any) -> tuple[torch.Tensor, Any]:
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(64, 32 + 40 * (n % 3))) for n in range(6)]
    optimizer = autopar.OffloadedOptimizer(
        torch.optim.AdamW, parameters, folder=folder, block_bytes=64 * 32 * 4, lr=1e-2
    )
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in parameters]), optimizer.state_dict()


def test_states_in_host_memory_and_through_it(tmp_path: Any) -> None:
    want, state = states_of(tmp_path)
    for folder in (None, tmp_path):
        with emulated_streams() as gpu:
            values, found = states_of(folder)
        assert gpu.copies
        assert not gpu.errors
        torch.testing.assert_close((values, found["state"]), (want, state["state"]), rtol=0, atol=0)


def test_cpus_have_no_host_memory_for_states() -> None:
    optimizer = autopar.OffloadedOptimizer(torch.optim.AdamW, [torch.nn.Parameter(torch.ones(4))])
    with pytest.raises(autopar.StrategyError, match=r"parameters are on cpu: give folder="):
        optimizer.step()


def test_a_plan_for_gpus_counts_blocks_of_states(tmp_path: Any) -> None:
    options = {"block_bytes": 1 << 20, "foreach": True}
    make = partial(autopar.OffloadedOptimizer, torch.optim.AdamW, **options)
    memory = OptimizerMemory.measure(make, "cuda")
    assert (memory.state, memory.stored, memory.block_bytes) == ((), 2.0, 1 << 20)
    in_files = OptimizerMemory.measure(partial(make, folder=tmp_path), "cpu")
    assert replace(memory, provenance="") == replace(in_files, provenance="")
    with pytest.raises(autopar.StrategyError):
        OptimizerMemory.measure(partial(make, no_such="option"), "cuda")
    with pytest.raises(autopar.StrategyError, match="without a folder"):
        OptimizerMemory.measure(make, "cpu")


def test_a_folder_for_parameters_of_gpus_is_an_error() -> None:
    strategy = autopar.Strategy(offload="parameters", offload_dir="/nvme")
    with pytest.raises(autopar.StrategyError, match=r"host memory only. Leave offload_dir out"):
        autopar.plan(
            torch.nn.Linear(4, 2),
            1,
            example_inputs=(torch.ones(3, 4),),
            strategy=strategy,
            cluster=autopar.Cluster.default(1, "cuda"),
        )
