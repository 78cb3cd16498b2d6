"""What a user does with a partitioned model beside training it: plans, compilers, odd sizes."""

import shutil
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.core.ir.placement import Shard
from autopar.session.live import LivePlanner
from autopar.train.verification.deviation import Verification
from benchmarks.memory import ProfilerCounter
from tests.harness.models import GPT, MODELS, Batch
from tests.harness.reference import batches
from tests.harness.training import Pair, close, fixed, rows_of
from tests.harness.worlds import run
from tests.runtime.test_fallback import Branching, rows
from tests.test_errors import all_raise

FUSED = {"*.attention.qkv.*": Shard(0, 3)}


def batch_of(name: str, step: int, count: int) -> Batch:
    (batch,) = batches(MODELS[name], [step], count)
    return batch


def train(pair: Pair, name: str, counts: list[int]) -> None:
    """A step of both models for each number of rows."""
    for step, count in enumerate(counts):
        args, kwargs = batch_of(name, step, count)
        losses = [MODELS[name].loss(model(*args, **kwargs)) for model in pair.models]
        close(losses[1], losses[0])
        for loss in losses:
            loss.backward()
        pair.step()
    pair.check_state()


def one_block() -> nn.Module:
    torch.manual_seed(0)
    return GPT(layers=1)


# -- plans -------------------------------------------------------------------------------------


def follow(rank: int, world_size: int, path: str) -> None:
    """A plan that is read from disk, at 13 rows that are uneven over data-parallel ranks."""
    pair = Pair(one_block, strategy="auto", plan=autopar.Plan.load(path))
    assert pair.parallel.data_parallel_size == 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LivePlanner, "make_strategies", None)  # the plan has those of this call
        train(pair, "gpt", [13])
    train(pair, "gpt", [8])
    names = dict(pair.parallel.named_parameters())
    shards = names["blocks.0.attention.qkv.weight"].to_local().shape
    assert shards == (3 * 32 // 4, 32)
    short = [tensor[:, :7] for tensor in batch_of("gpt", 3, 4)[0]]
    for model in pair.models:
        model.eval()
    with torch.no_grad():
        close(*(model(*short) for model in reversed(pair.models)))


@pytest.mark.slow
def test_a_saved_plan_is_followed(tmp_path: Path) -> None:
    path, inputs = str(tmp_path / "plan.json"), batch_of("gpt", 0, 13)[0]
    strategy = fixed(3, tp=2, placements=FUSED)
    plan = autopar.plan(one_block().double(), 4, example_inputs=inputs, strategy=strategy)
    plan.save(path)
    run(follow, 4, path=path, timeout=300)


class Softmax(nn.Module):
    """Softmax over one of two dims of equal size."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dim, self.before, self.after = dim, nn.Linear(512, 4096), nn.Linear(4096, 512)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.before(x).view(-1, 64, 64).softmax(self.dim)
        return self.after(weights.flatten(1)).square().mean()


def follow_other_constant(rank: int, world_size: int, document: dict[str, Any]) -> None:
    rows = torch.randn(64, 512, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    plan = autopar.Plan.from_dict(document)
    pair = Pair(lambda: Softmax(2), strategy="auto", plan=plan)
    for _ in range(2):
        losses = [model(rows) for model in pair.models]
        close(losses[1], losses[0])
        for loss in losses:
            loss.backward()
        pair.step()
    pair.check_state()


def test_a_plan_of_another_constant_is_not_followed_blindly() -> None:
    """softmax(1) may be divided along dim 2, and softmax(2) may not."""
    plan = autopar.plan(
        Softmax(1).double(),
        2,
        example_inputs=(torch.randn(64, 512).double(),),
        strategy=fixed(0, tp=2),
        cluster=autopar.Cluster.default(2),
    )
    strategies = {str(found) for own in plan.partitions for found, _ in own.strategies}
    assert "S(2) -> S(2)" in strategies
    run(follow_other_constant, 2, document=plan.to_dict(), timeout=300)


def verified(rank: int, world_size: int) -> Verification:
    strategy = fixed(2, tp=2, placements=FUSED)
    return autopar.verify(one_block(), example_inputs=batch_of("gpt", 0, 5)[0], strategy=strategy)


@pytest.mark.slow
def test_verify_compares_whole_parameters() -> None:
    for found in run(verified, 4, timeout=300):
        assert found.passed, str(found)


# -- compilers and scalers ---------------------------------------------------------------------


def through_inductor(rank: int, world_size: int) -> list[list[int]]:
    peaks = []
    for backend in ("eager", "inductor"):
        pair = Pair(one_block, strategy=fixed(0, tp=2), backend=backend)
        train(pair, "gpt", [5, 5])
        args, _ = batch_of("gpt", 2, 5)
        with ProfilerCounter() as counter:
            for _ in range(40):
                with counter.step("step"):
                    pair.parallel(*args).backward()
                    pair.step()
        peaks.append(counter.peaks()["step"])
    return peaks


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")
def test_inductor_is_exact_and_takes_no_more_memory() -> None:
    ranks = run(through_inductor, 2, timeout=400)
    eager, inductor = (
        statistics.median(peak for peaks in one for peak in peaks)
        for one in zip(*ranks, strict=True)
    )
    # 6 %: gloo's threads hold up to three messages a moment longer, each 1.7 % of the peak
    assert inductor <= 1.06 * eager


def scale(rank: int, world_size: int) -> None:
    """An overflow in one rank's shard makes all skip the step, as the plain model does."""
    pair = Pair("encoder", strategy=fixed(0, tp=2))
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in pair.models]
    for step in range(3):
        args, kwargs = batch_of("encoder", step, 5)
        for model, optimizer, scaler in zip(pair.models, pair.optimizers, scalers, strict=True):
            scaler.scale(model(*args, **kwargs)["loss"]).backward()
            if step == 1:
                spoil(model.layers[0].mlp[0].weight.grad, rank)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scalers[1].get_scale() == scalers[0].get_scale() == 1024.0 / (1 + (step > 0))
    pair.check_state()


def spoil(gradient: Tensor, rank: int) -> None:
    """An infinity in the last element, of which the last rank alone has the shard."""
    if isinstance(gradient, DTensor):
        assert gradient.placements[0].is_shard()
        if rank == 0:
            return
        gradient = gradient.to_local()
    gradient[-1, -1] = torch.inf


@pytest.mark.slow
def test_an_overflow_in_one_shard_is_met_by_all() -> None:
    run(scale, 2)


# -- what cannot be captured, or divided -------------------------------------------------------


def fall_back(rank: int, world_size: int, batch: str) -> str:
    """Torch's DDP trains what cannot be captured: on all ranks, whoever has which rows."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pair = Pair(Branching, strategy=fixed(0, tp=2), batch=batch, fallback=True)
        groups, group = pair.parallel.data_parallel_size, pair.parallel.data_parallel_rank
        assert (groups, group) == (2, rank // 2)
        for step in range(3):
            x = rows(step)
            given = rows_of(((x,), {}), group, groups)[0][0] if batch == "local" else x
            losses = [pair.plain(x), pair.parallel(given)]
            close(losses[1], losses[0])
            for loss in losses:
                loss.backward()
            pair.check_gradients()
            pair.step()
    pair.check_state()
    said = {str(w.message) for w in caught if "autopar" in str(w.message)}
    assert len(said) == (rank == 0)
    return "".join(said)


@pytest.mark.parametrize("batch", ["global", "local"])
def test_what_cannot_be_captured_trains_undivided(batch: str) -> None:
    said, *_ = run(fall_back, 4, batch=batch)
    assert "DistributedDataParallel instead and does not divide the model" in said
    assert "x.abs().max() > 1e3" in said


class Narrow(nn.Module):
    """Layers of odd sizes; of one unit there is nothing to divide at all."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(map(nn.Linear, sizes, sizes[1:]))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def narrow(rank: int, world_size: int, sizes: list[int], count: int) -> tuple[str, ...]:
    pair = Pair(lambda: Narrow(*sizes), strategy=fixed(0, tp=2))
    for step in range(3):
        x = torch.randn(
            count, sizes[0], generator=torch.Generator().manual_seed(step), dtype=torch.float64
        )
        for model in pair.models:
            model(x).backward()
        pair.step()
    pair.check_state()
    return pair.parallel.plan.notes


def test_what_cannot_be_divided_trains_on_every_rank() -> None:
    run(narrow, 2, sizes=[7, 13, 5], count=3)
    for notes in run(narrow, 2, sizes=[1, 1, 1], count=1):
        assert any("nothing is worth dividing over tp" in note for note in notes)


# -- ranks that fail ---------------------------------------------------------------------------


def fail_alone(rank: int, world_size: int) -> None:
    """Between the calls of the others, which wait for it along tp."""
    pair = Pair(one_block, strategy=fixed(3, tp=2))
    for step in range(4):
        if (rank, step) == (1, 2):
            raise ValueError("the user's own mistake")
        pair.parallel(*batch_of("gpt", step, 6)[0]).backward()


@pytest.mark.slow
def test_no_rank_waits_for_one_that_failed() -> None:
    begin = time.monotonic()
    answers = run(fail_alone, 4, expect_errors=True)
    assert answers[1] == ("ValueError", "the user's own mistake")
    others = [answers[0], *answers[2:]]
    all_raise(others, autopar.CommunicationError, "first error among all ranks")
    assert time.monotonic() - begin < 60
