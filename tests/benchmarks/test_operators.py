"""The benchmark of torch's operators: its samples, its judgement, and a few operators."""

import os
from collections.abc import Sequence

import pytest
import torch

from benchmarks.operators import case
from benchmarks.operators.__main__ import parse_arguments, work
from benchmarks.operators.case import Case, Work
from benchmarks.operators.layer import Layer, deviation, observe, samples


@pytest.mark.slow  # it imports torch's tests
def test_a_seed_draws_the_same_samples() -> None:
    first, again = (samples("cumsum", 3, 3) for _ in range(2))
    assert [sample.number for sample in first] == [sample.number for sample in again]
    assert [len(samples(name, 0, 2)) for name in ("add", "nn.functional.one_hot")] == [2, 2]
    for one, two in zip(first, again, strict=True):
        torch.testing.assert_close(one.tensors, two.tensors)


@pytest.mark.slow
def test_a_layer_trains_a_parameter_of_every_argument() -> None:
    (sample,) = samples("addmm", 0, 1)
    values = observe(Layer(sample), sample, 0)
    trained = [name for name in values if name.startswith("gradient of terms")]
    assert len(trained) == 3
    assert all(values[name].abs().sum() > 0 for name in trained)


def test_deviations_are_multiples_of_the_tolerance() -> None:
    wanted = {"output": torch.ones(4, dtype=torch.float64)}
    assert deviation(wanted, wanted) == (0, "output")
    assert deviation({"output": wanted["output"] * (1 + 5e-10)}, wanted)[0] == pytest.approx(0.5)
    assert deviation({"output": wanted["output"][:2]}, wanted)[0] == float("inf")
    assert deviation({}, wanted) == (float("inf"), "output")


@pytest.mark.slow
def test_memory_without_values_does_not_count() -> None:
    (sample,) = samples("empty_like", 0, 1)
    assert case.case_of(sample, "one", 0).outcome == ""


def test_the_worst_rank_counts() -> None:
    exact, silent = (Case("add", 0, "ddp", name, deviation=0.0) for name in ("exact", "silent"))
    told = Case("add", 0, "ddp", "told", message="CaptureError: no")
    assert case._merged([[exact], [silent]]) == [silent]
    assert case._merged([[told], [told]]) == [told]
    assert case._merged([[told], [exact]])[0].outcome == "raw"


def dying(
    rank: int, world_size: int, work: Sequence[Work], cell: str, seed: int, count: int
) -> list[Case]:
    """The cases of a rank that all samples but the first end, as a fault of memory does."""
    chosen = [
        (name, sample.number)
        for name, number in work
        for sample in samples(name, seed, count)
        if number in (None, sample.number)
    ]
    if any(number for _, number in chosen):
        os._exit(9)
    return [Case(name, number, cell, "exact") for name, number in chosen]


@pytest.mark.slow
def test_a_process_that_dies_costs_its_sample_alone() -> None:
    cases = case.run_cases(["add", "mul"], "one", 0, 2, on_rank=dying)
    assert [each.outcome for each in cases] == ["exact", "crashed"] * 2


@pytest.mark.slow
def test_operators_are_chosen_by_a_seed() -> None:
    chosen = [list(work(parse_arguments(["--sample", "9", "--seed", "4"]))) for _ in range(2)]
    assert chosen[0] == chosen[1]
    assert [len(names) for _, names in chosen[0]] == [8, 1]
