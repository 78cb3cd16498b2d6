"""Activations on storage: the plain model's numbers under every kind of plan, and clear errors."""

import errno
import gc
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import autopar
from autopar.core.common import block_storage
from autopar.core.operators import offload
from autopar.passes import pipeline
from autopar.passes.memory.offload_activations import OffloadActivations
from benchmarks.memoize import memoized_capture
from tests.harness.models import MODELS
from tests.harness.reference import batches, reference, snapshot, train_steps, worst_error
from tests.harness.training import ADAMW, assert_same_bits, fixed
from tests.harness.worlds import run

ROWS, STEPS = 8, 3
CAPTURES: dict[Any, Any] = {}
SMALL = mock.patch.object(
    pipeline, "OffloadActivations", partial(OffloadActivations, least_bytes=1)
)


def away(folder: Any, zero: int = 0, **options: Any) -> autopar.Strategy:
    return fixed(zero, offload="activations", offload_dir=str(folder), **options)


def trained(
    name: str, strategy: autopar.Strategy, backend: str = "eager"
) -> tuple[list[float], Any]:
    case = MODELS[name]
    given = list(batches(case, range(STEPS), ROWS))
    with SMALL, memoized_capture(CAPTURES):
        model = autopar.compile(
            case.make().double(),
            strategy=strategy,
            example_inputs=_bound(case, given[0]),
            backend=backend,
        )
        losses = train_steps(model, ADAMW(model.parameters()), case, given)
    return losses, model


def _bound(case: Any, batch: Any) -> Any:
    return batch[0] if not batch[1] else {**_named(case.make(), batch[0]), **batch[1]}


def _named(model: nn.Module, args: Any) -> dict[str, Any]:
    names = list(model.forward.__code__.co_varnames)[1:]
    return dict(zip(names, args, strict=False))


def train_like_plain(rank: int, world_size: int, name: str, folder: str, options: Any) -> None:
    want = reference(MODELS[name], STEPS, torch.float64, ADAMW, ROWS)
    losses, model = trained(name, away(folder, **options))
    assert offload.storage_in(folder).size, "nothing was offloaded"
    assert losses == pytest.approx(want.losses, rel=1e-9)
    assert worst_error(snapshot(model.full_state_dict()), want.state)[0] <= 1e-9
    gc.collect()
    assert not offload._stored, "values outlive their step"


PLANS: dict[str, Any] = {
    "ddp": {},
    "zero3": {"zero": 3},
    "tp": {"tp": 2},
    "pp": {"pp": 2, "micro_batches": 2},
    "recompute": {"zero": 1, "recompute": "selective", "micro_batches": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_the_plain_models_numbers(name: str, tmp_path: Path) -> None:
    run(train_like_plain, 2, name="gpt", folder=str(tmp_path), options=PLANS[name])


@pytest.mark.parametrize("name", ["dropout", "conv"])
def test_bit_for_bit_on_one_rank(name: str, tmp_path: Path) -> None:
    assert_same_bits(partial(trained, name), fixed(0), away(tmp_path))
    assert not list(tmp_path.iterdir()), "the file has no name"


@pytest.mark.slow
def test_inductor_sees_reads_as_new_memory(tmp_path: Path) -> None:
    train = partial(trained, "gpt", backend="inductor")
    assert_same_bits(train, fixed(0), away(tmp_path))


def test_a_backward_may_run_twice_and_room_is_used_again(tmp_path: Path) -> None:
    case = MODELS["gpt"]
    (args, _), *_ = batches(case, [0], ROWS)
    with SMALL:
        model = autopar.compile(case.make().double(), strategy=away(tmp_path), example_inputs=args)
        sizes, gradients = [], []
        for _ in range(3):
            loss = model(*args)
            loss.backward(retain_graph=True)
            loss.backward()
            sizes.append(offload.storage_in(str(tmp_path)).size)
            gradients.append([p.grad.clone() for p in model.parameters()])
            model.zero_grad()
            model(*args)  # never comes to its backward
    torch.testing.assert_close(gradients[0], gradients[2], rtol=0, atol=0)
    assert sizes[1] == sizes[2]


def without_folder(rank: int, world_size: int, folder: str) -> None:
    os.chdir(folder if rank else f"{folder}/0")
    with pytest.raises(autopar.AutoparError, match=r"no file can be made in here"):
        trained("gpt", away("here"))
    os.chdir("/")


def test_all_ranks_raise_where_one_has_no_folder(tmp_path: Path) -> None:
    (tmp_path / "0" / "here").mkdir(parents=True)
    run(without_folder, 2, folder=str(tmp_path))


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(block_storage.os, "posix_fallocate", full)
    with pytest.raises(autopar.OffloadError, match=r"No space left.*bytes are free.*more room"):
        trained("gpt", away(tmp_path))


def test_a_file_cut_short_under_the_run(tmp_path: Path) -> None:
    case = MODELS["gpt"]
    (args, _), *_ = batches(case, [0], ROWS)
    with SMALL:
        model = autopar.compile(case.make().double(), strategy=away(tmp_path), example_inputs=args)
        loss = model(*args)
    os.ftruncate(offload.storage_in(str(tmp_path))._file, 0)
    with pytest.raises(autopar.OffloadError, match=r"was cut short.*Resume from a checkpoint"):
        loss.backward()


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.train.offload.test_activations import away, trained
losses, model = trained("gpt", away(sys.argv[1]))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_killed_process_leaves_no_file(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert not list(tmp_path.iterdir())


def test_offload_of_a_cpu_needs_a_folder() -> None:
    with pytest.raises(autopar.StrategyError, match=r"needs a folder, because CPUs.*offload_dir"):
        trained("gpt", fixed(0, offload="activations"))
