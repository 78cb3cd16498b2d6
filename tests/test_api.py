"""`compile`, `plan` and `Plan` as a user first meets them."""

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.core.plan.buckets import Buckets
from autopar.core.plan.compression import Compressions
from tests.harness.models import MODELS
from tests.harness.training import Setup, assert_same_training, close, fixed, plain, train
from tests.harness.worlds import run

GPT = MODELS["gpt"]
INPUTS = GPT.batch(8, 0)[0]


def planned(**options: Any) -> autopar.Plan:
    """A plan that leaves nothing to choose, without a process group."""
    given = {"world_size": 2, "example_inputs": INPUTS, "strategy": fixed(3), **options}
    model = GPT.make().to(given.pop("dtype", torch.float32))
    return autopar.plan(model, **given)


# -- compile -----------------------------------------------------------------------------------


def test_one_process_needs_nothing() -> None:
    models = autopar.compile(GPT.make()), GPT.make()
    for model in models:
        model(*INPUTS).backward()
    have, want = ({n: p.grad for n, p in model.named_parameters()} for model in models)
    close(have, want, 1e-6)
    assert not dist.is_initialized()
    assert models[0].plan.world_size == 1
    assert models[0].mesh is None


def by_default(rank: int, world_size: int) -> tuple[str, str, list[float]]:
    """Everything is chosen, on what is measured here; the process group is made too."""
    torch.manual_seed(rank)
    case = MODELS["odd"]
    model = autopar.compile(case.make(), world_size)
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for seed in range(3):
        args, kwargs = case.batch(6, seed)
        loss = case.loss(model(*args, **kwargs))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert dist.get_backend() == "gloo"
    return model.plan.to_json(), str(model.plan), losses


def test_everything_by_default() -> None:
    (plan, text, losses), (other, _, same) = run(by_default, 2, init=False)
    assert plan == other
    assert losses == same
    document = json.loads(plan)
    assert document["prediction"]["provenance"]["measured"] > 0
    assert "measured" in document["cluster"]
    assert document["runners_up"]
    assert "predicted" in text
    args, kwargs = MODELS["odd"].batch(6, 0)
    want = MODELS["odd"].make()(*args, **kwargs)["losses"][0].item()
    assert losses[0] == pytest.approx(want, rel=1e-6)


def follow(rank: int, world_size: int, path: str) -> None:
    """The optimizer is made before the first call, as always."""
    setup = Setup(batch="global", rows=13)
    got = train(rank, world_size, "gpt", torch.float64, setup, plan=autopar.Plan.load(path))
    assert_same_training(got, plain("gpt", torch.float64, setup.rows), 1e-9)


@pytest.mark.slow
def test_a_plan_from_a_file_is_followed(tmp_path: Path) -> None:
    strategy = fixed({"": 3, "blocks.1": 2}, "selective")
    planned(strategy=strategy, dtype=torch.float64).save(tmp_path / "plan.json")
    run(follow, 2, path=str(tmp_path / "plan.json"))


@pytest.mark.slow
@pytest.mark.parametrize("more", [{"zero": 3}, {"tp": 2}], ids=str)
def test_a_plan_by_arithmetic_is_followed(tmp_path: Path, more: dict[str, Any]) -> None:
    """It has sizes of buckets, and placements of parameters, and leaves the rest to the ranks."""
    plan = planned(strategy=fixed(**more), dtype=torch.float64)
    bare = [dataclasses.replace(p, graph="", rows=0, strategies=()) for p in plan.partitions]
    changes = {"buckets": Buckets(), "bucket_bytes": (4096, 8192), "partitions": tuple(bare)}
    plan = dataclasses.replace(plan, compressions=Compressions(), **changes)
    plan.save(tmp_path / "plan.json")
    run(follow, 2, path=str(tmp_path / "plan.json"))


def plan_early(rank: int, world_size: int) -> list[str]:
    """Example inputs as a tuple, a dict and a single tensor; the plan is there at once."""
    texts = []
    ids, targets = INPUTS
    for inputs in ((ids, targets), {"ids": ids, "targets": targets}):
        model = autopar.compile(GPT.make(), strategy="zero2", example_inputs=inputs)
        texts.append(model.plan.to_json())
    layer = autopar.compile(nn.Linear(6, 6), example_inputs=torch.ones(4, 6), strategy=fixed(3))
    assert layer.weight.to_local().shape[0] == 3
    layer(torch.ones(4, 6)).sum().backward()
    return texts


@pytest.mark.slow
def test_example_inputs_may_be_given_in_any_form() -> None:
    for answer in run(plan_early, 2):
        stages = [dict(json.loads(text)["zero_stages"]) for text in answer]
        assert all(set(stage.values()) == {2} for stage in stages)


def train_two(rank: int, world_size: int) -> None:
    """Two models side by side, as a GAN or a teacher with its student has them."""
    torch.manual_seed(0)
    teacher = autopar.compile(nn.Linear(4, 3), strategy=fixed(3))
    student = autopar.compile(nn.Linear(4, 3), strategy=fixed(0), loss_fn=F.mse_loss, batch="local")
    optimizer = torch.optim.Adam(student.parameters(), lr=0.1)
    losses = []
    for step in range(30):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        with torch.no_grad():
            target = teacher(x)
        rows = slice(4 * rank, 4 * rank + 4)  # the teacher's results are those of the whole batch
        loss = student(x[rows], target[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 10


def test_two_models_side_by_side() -> None:
    run(train_two, 2)


# -- plan --------------------------------------------------------------------------------------


def test_planning_needs_neither_ranks_nor_memory() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)), nn.Flatten(0))
        inputs = torch.empty(32, 256)
    plan = autopar.plan(model, 16, example_inputs=inputs, strategy="zero3")
    assert plan.world_size == 16
    assert plan.prediction is not None
    assert "modelled" in plan.cluster
    assert all(p.device.type == "meta" for p in model.parameters())


def test_plans_are_values(tmp_path: Path) -> None:
    plan = planned()
    plan.save(tmp_path / "plan.json")
    loaded = autopar.Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert loaded.to_json() == plan.to_json() == planned().to_json()
    assert not plan.diff(loaded)
    other = dataclasses.replace(plan, prefetch=2)
    assert plan.diff(other) == "prefetch: 1 -> 2"
    assert other.digest() != plan.digest()
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.prefetch = 3  # type: ignore[misc]


@pytest.mark.slow
def test_plans_can_be_read(tmp_path: Path) -> None:
    plan = planned(strategy="auto", memory="1GiB")
    table = str(plan)
    for part in ("GPT on 2 ranks", "blocks.0", "between steps", "mesh", "predicted"):
        assert part in table
    why = plan.explain()
    assert why.startswith(f"Chosen: {plan.name}.")
    assert "stay free" in why
    assert "Also considered" in why
    plan.report(tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    assert "<svg" in page
    assert "http" not in page.replace("http://www.w3.org", "")


@pytest.mark.slow
def test_what_the_optimizer_keeps_counts() -> None:
    peaks = []
    for optimizer in (torch.optim.SGD, torch.optim.AdamW):
        plan = planned(strategy="ddp", optimizer=optimizer)
        assert plan.prediction is not None
        peaks.append(plan.prediction.peak_bytes)
    whole = sum(p.numel() * p.element_size() for p in GPT.make().parameters())
    assert peaks[1] - peaks[0] >= whole


def test_the_default_is_no_surprise() -> None:
    """Nothing is said on the way."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = autopar.compile(GPT.make(), strategy=fixed())
        loss: Tensor = model(*INPUTS)
    assert loss.shape == ()


def test_public_names_of_a_plan_are_its_fields_and_what_users_call() -> None:
    fields = {each.name for each in dataclasses.fields(autopar.Plan)}
    names = {name for name in dir(autopar.Plan) if not name.startswith("_")} - fields
    sizes = {"dp_size", "pp_size", "model_parallel_size"}
    documents = {"load", "save", "from_dict", "to_dict", "to_json", "digest"}
    assert names == {"diff", "explain", "report", "timeline"} | sizes | documents
