"""Models cut into stages train exactly as on one device: any schedule, any other axis beside."""

import contextlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

import autopar
from tests.harness.models import MODELS
from tests.harness.reference import Reference, batches, to_dtype, train_steps
from tests.harness.training import (
    ADAMW,
    EXACT,
    Pair,
    assert_same_training,
    close,
    fixed,
    plain,
    rows_of,
    shared_captures,
    train_compiled,
    whole_state,
)
from tests.harness.worlds import run
from tests.runtime.test_module import make_regressor, regress, regression

ROWS = 8
f64 = torch.float64
f32 = torch.float32


def staged(pp: int, micro_batches: int = 4, schedule: str = "1f1b", **options: Any) -> Any:
    """A strategy of stages that leaves nothing to choose."""
    given: Any = {"pp": pp, "micro_batches": micro_batches, "schedule": schedule, **options}
    return fixed(given.pop("zero", 0), **given)


def train(
    rank: int, world_size: int, name: str, setups: list[dict[str, Any]], dtype: torch.dtype
) -> list[Reference]:
    given = list(batches(MODELS[name], range(10), ROWS, dtype))
    return [train_compiled(name, dtype, given, strategy=staged(**options)) for options in setups]


@pytest.mark.parametrize(
    ("name", "world_size", "setups"),
    [
        (
            "gpt",
            2,
            [
                {"pp": 2, "schedule": "gpipe", "micro_batches": 1},
                {"pp": 2, "schedule": "1f1b"},
                {"pp": 2, "schedule": "interleaved", "micro_batches": 2},
                {"pp": 2, "schedule": "zero_bubble", "micro_batches": 8},
            ],
        ),
        pytest.param("gpt", 3, [{"pp": 3, "schedule": "zero_bubble"}], marks=pytest.mark.slow),
        pytest.param(
            "gpt",
            4,
            [
                {"pp": 4},
                {"pp": 2, "zero": 3},
                {"pp": 2, "zero": 1},
                {"pp": 2, "zero": 2, "schedule": "interleaved"},
                {"pp": 2, "tp": 2},
            ],
            marks=pytest.mark.slow,
        ),
        # one bucket of reductions, awaited behind a backward whose values it shares
        ("gpt", 4, [{"pp": 2, "zero": 1}, {"pp": 2, "tp": 2, "zero": 1, "reduce_bytes": 1 << 20}]),
        # in a V the tied embedding and head are on one rank
        (
            "gpt",
            2,
            [
                {"pp": 2, "schedule": "zbv"},
                {"pp": 2, "schedule": "dualpipe_v"},
                {"pp": 2, "schedule": "dualpipe_v", "micro_batches": 2},
            ],
        ),
        pytest.param(
            "gpt",
            4,
            [
                *({"pp": 2, "schedule": "zbv", "zero": zero} for zero in range(4)),
                {"pp": 2, "schedule": "dualpipe_v", "zero": 1},
                {"pp": 2, "schedule": "zbv", "tp": 2},
                {"pp": 2, "schedule": "dualpipe_v", "tp": 2, "micro_batches": 8},
                {"pp": 4, "schedule": "zbv", "micro_batches": 8},
                {"pp": 4, "schedule": "dualpipe_v", "micro_batches": 8},
                {"pp": 4, "schedule": "zbv", "micro_batches": 2},
            ],
            marks=pytest.mark.slow,
        ),
        ("encdec", 2, [{"pp": 2, "schedule": "interleaved"}, {"pp": 2, "schedule": "zbv"}]),
        ("conv", 2, [{"pp": 2, "micro_batches": 1}, {"pp": 2, "schedule": "zbv"}]),
        ("odd", 2, [{"pp": 2, "micro_batches": 2}]),
        ("encoder", 2, [{"pp": 2}]),
        ("moe", 2, [{"pp": 2}, {"pp": 2, "schedule": "zbv"}]),
    ],
)
def test_pipelines_train_exactly(name: str, world_size: int, setups: list[dict[str, Any]]) -> None:
    want = plain(name, f64, ROWS)
    answers = run(train, world_size, name=name, setups=setups, dtype=f64, timeout=300)
    for rank, found in enumerate(answers):
        for got, setup in zip(found, setups, strict=True):
            assert_same_training(got, want, EXACT[f64], f"rank {rank} under {setup}")


def train_through_inductor(rank: int, world_size: int) -> Reference:
    given = list(batches(MODELS["gpt"], range(3), ROWS, f64))
    return train_compiled("gpt", f64, given, strategy=staged(2, zero=1), backend="inductor")


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")
def test_compiled_stages_train_exactly() -> None:
    """No message is under way between two compiled functions, which write over its buffers."""
    given = list(batches(MODELS["gpt"], range(3), ROWS, f64))
    want = train_compiled("gpt", f64, given)
    for rank, got in enumerate(run(train_through_inductor, 4, timeout=400)):
        assert_same_training(got, want, EXACT[f64], f"rank {rank}")


def test_float32_trains_exactly() -> None:
    for (got,) in run(train, 2, name="gpt", setups=[{"pp": 2}], dtype=f32):
        assert_same_training(got, plain("gpt", f32, ROWS), EXACT[f32])


# -- what a training loop does beside steps ----------------------------------------------------


def batch_of(name: str, step: int, rows: int = ROWS) -> Any:
    return to_dtype(MODELS[name].batch(rows, step), f64)


def loop(rank: int, world_size: int, schedule: str) -> None:
    """Gradients accumulate, are scaled and clipped; batches may be smaller; evaluation fits in."""
    pair = Pair("gpt", strategy=staged(2, schedule=schedule))
    for step in range(3):
        for part, rows in enumerate((8, 4)):
            args, _ = batch_of("gpt", 2 * step + part, rows)
            losses = [model(*args) for model in pair.models]
            close(losses[1], losses[0])
            for loss in losses:
                (loss * 1024).backward()
        norms = [
            torch.nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.1),
            pair.parallel.clip_grad_norm_(0.1),
        ]
        close(norms[1], norms[0])
        pair.step()
        for model in pair.models:
            model.eval()
        with torch.no_grad():
            close(*(model(*batch_of("gpt", 9, 4)[0]) for model in reversed(pair.models)))
        for model in pair.models:
            model.train()
    pair.check_state()


LAYOUTS = pytest.mark.parametrize("schedule", ["1f1b", "zbv"])


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipe_v"])
def test_loops(schedule: str) -> None:
    run(loop, 2, schedule=schedule)


def held_back(rank: int, world_size: int, schedule: str) -> None:
    """Under no_sync gradients stay on data-parallel ranks until the next call."""
    pair = Pair("encoder", strategy=staged(2, 2, schedule, zero=2))
    for part in range(3):
        args, kwargs = batch_of("encoder", part, 8)
        with pair.parallel.no_sync() if part < 2 else contextlib.nullcontext():
            for model in pair.models:
                (MODELS["encoder"].loss(model(*args, **kwargs)) / 3).backward()
    pair.step()
    pair.check_state()


@pytest.mark.slow
@LAYOUTS
def test_gradients_are_held_back(schedule: str) -> None:
    run(held_back, 4, schedule=schedule)


def bring_rows(rank: int, world_size: int, schedule: str) -> None:
    """Each data-parallel rank brings its rows, or all are given all, even or not."""
    pair = Pair("gpt", strategy=staged(2, 2, schedule, zero=3), batch="local")
    args, _ = batch_of("gpt", 0)
    own = pair.parallel.data_parallel_rank, pair.parallel.data_parallel_size
    losses = pair.plain(*args), pair.parallel(*rows_of((args, {}), *own)[0])
    close(losses[1], losses[0])
    for loss in losses:
        loss.backward()
    pair.step()
    pair.check_state()
    pair = Pair("gpt", strategy=staged(2, 2, schedule))
    for step, rows in enumerate((8, 7, 5)):
        for model in pair.models:
            model(*batch_of("gpt", step, rows)[0]).backward()
        pair.step()
    pair.check_state()


@pytest.mark.slow
@LAYOUTS
def test_rows_over_data_parallel_ranks(schedule: str) -> None:
    run(bring_rows, 4, schedule=schedule)


def make_deep() -> nn.Module:
    """Two stages for each of two ranks."""
    model = make_regressor()
    hidden = [layer for _ in range(2) for layer in (nn.Linear(9, 9), nn.Tanh())]
    first, tanh, last = model.layers  # type: ignore[misc]
    model.layers = nn.Sequential(first, tanh, *hidden, last)
    return model


def loss_outside(rank: int, world_size: int, schedule: str) -> None:
    """The model returns rows, and gradients enter by them."""
    pair = Pair(make_deep, strategy=staged(2, 2, schedule))
    for seed in range(3):
        x, y = regression(8, seed)
        outputs = [model(x) for model in pair.models]
        close(outputs[1], outputs[0])
        for output in outputs:
            F.mse_loss(output, y).backward()
        pair.step()
    pair.check_state()


def two_at_once(rank: int, world_size: int, schedule: str) -> None:
    """Two calls before either's backward."""
    pair = Pair(make_deep, strategy=staged(2, 2, schedule))
    for seed in range(2):
        given = [regression(8, 10 * seed + part) for part in range(2)]
        for model in pair.models:
            outputs = [model(x) for x, _ in given]
            losses = [F.mse_loss(out, y) for out, (_, y) in zip(outputs, given, strict=True)]
            losses[0].backward()
            losses[1].backward()
        pair.step()
    pair.check_state()


@pytest.mark.parametrize("how", [loss_outside, two_at_once], ids=lambda how: how.__name__)
@LAYOUTS
def test_losses_made_outside_of_the_model(how: Any, schedule: str) -> None:
    run(how, 2, schedule=schedule)


def freeze(rank: int, world_size: int, schedule: str) -> None:
    """By their modules between steps, or by name, before the first step and between them."""
    pair = Pair(make_deep, strategy=staged(2, 2, schedule), loss_fn=F.mse_loss)
    for seed in range(4):
        for model in pair.models:
            regress(model, *regression(8, seed)).backward()
        pair.step()
        for model in pair.models:
            model.layers[2].requires_grad_(seed == 2)
    pair.check_state()
    plan = pair.parallel.plan
    pair = Pair(make_deep, plan=plan, loss_fn=F.mse_loss)
    for model in pair.models:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("bias" not in name)
    for seed in range(3):
        for model in pair.models:
            regress(model, *regression(8, seed)).backward()
        pair.step()
        for model in pair.models:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name.endswith("weight") == bool(seed))
    pair.check_state()


@LAYOUTS
def test_parameters_may_be_frozen(schedule: str) -> None:
    run(freeze, 2, schedule=schedule)


def draw(rank: int, world_size: int) -> list[float]:
    """Dropout runs; stages draw different numbers, and every rank hears of the same loss."""
    model = autopar.compile(MODELS["dropout"].make(), strategy=staged(2))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    given = [batch_of("dropout", 0)] * 20
    return train_steps(model, optimizer, MODELS["dropout"], given)


def test_dropout() -> None:
    first, second = run(draw, 2)
    assert first == second
    assert len(set(first)) == len(first)
    assert first[-1] < first[0] - 0.1


# -- checkpoints -------------------------------------------------------------------------------

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def resume(
    rank: int,
    world_size: int,
    source: str | None,
    target: str,
    which: range,
    options: dict[str, Any],
) -> Reference:
    """Trains on from a checkpoint, if there is one, and writes another."""
    strategy = staged(**options) if "pp" in options else fixed(**options)
    model = autopar.compile(MODELS["gpt"].make().double(), strategy=strategy)
    optimizer = ADAMW(model.parameters())
    if source is not None:
        parts = state_of(model, optimizer)
        checkpoint.load(parts, checkpoint_id=source)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=parts["model"],
            optim_state_dict=parts["optimizer"],
            options=FLAT,
        )
    with shared_captures("gpt", f64):
        losses = train_steps(model, optimizer, MODELS["gpt"], batches(MODELS["gpt"], which, ROWS))
    checkpoint.save(state_of(model, optimizer), checkpoint_id=target)
    return Reference(losses, whole_state(model))


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer, options=FLAT)
    return {"model": model_state, "optimizer": optimizer_state}


@pytest.mark.slow
def test_training_moves_between_layouts(tmp_path: Path) -> None:
    setups: list[tuple[int, dict[str, Any]]] = [
        (4, {"pp": 2, "tp": 2, "zero": 3}),
        (2, {"zero": 3}),
        (3, {"pp": 3}),
        (2, {"pp": 2, "schedule": "zbv"}),
        (2, {"pp": 2, "schedule": "interleaved", "zero": 1}),
        (2, {"tp": 2}),
        (1, {}),
    ]
    want = plain("gpt", f64, ROWS, 2 * len(setups))
    losses: list[float] = []
    source = None
    for turn, (ranks, options) in enumerate(setups):
        target = str(tmp_path / str(turn))
        places = {"source": source, "target": target, "options": options}
        answers = run(resume, ranks, which=range(2 * turn, 2 * turn + 2), **places)
        source, losses = target, losses + answers[0].losses
    assert_same_training(Reference(losses, answers[0].state), want, EXACT[f64])
