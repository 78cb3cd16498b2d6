"""A run that stops and resumes trains as one that never stopped."""

import errno
import json
import os
import pickle
import resource
import signal
import threading
import time
import warnings
from concurrent import futures
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

import autopar
from autopar.runtime.parameters.distribute import is_remote
from autopar.train.checkpoints import background
from autopar.train.checkpoints.folder import (
    CHECKSUMS,
    CheckpointFolder,
    file_sum,
)
from tests.harness.models import MODELS
from tests.harness.training import ADAMW, close, fixed, shared_captures, whole_state
from tests.harness.worlds import run, run_isolated

f64 = torch.float64
STEPS = 8


def make(strategy: Any, name: str = "dropout") -> tuple[Any, Any, Any]:
    """A model that draws random numbers, its optimizer and a schedule."""
    example = MODELS[name].batch(4, 0)[0]
    with shared_captures(name, f64):
        model = autopar.compile(
            MODELS[name].make().to(f64), strategy=strategy, example_inputs=example, fallback=False
        )
    optimizer = ADAMW(model.parameters())
    return model, optimizer, StepLR(optimizer, step_size=3, gamma=0.5)


def loader() -> DataLoader[Any]:
    """Five batches an epoch, in another order each time."""
    x, y = MODELS["dropout"].batch(20, 1)[0]
    return DataLoader(list(zip(x, y, strict=True)), 4, shuffle=True)


def names(folder: str | Path) -> list[str]:
    """Checkpoints in a folder, finished or not."""
    return sorted(name for name in os.listdir(folder) if not name.startswith("."))


def train(folder: str, strategy: Any, stop_after: int = STEPS, **options: Any) -> Any:
    """Losses by step and the final weights; the run breaks after `stop_after` steps."""
    model, optimizer, scheduler = make(strategy)
    checkpointer = autopar.Checkpointer(
        folder, model, optimizer, scheduler=scheduler, every=2, keep=2, **options
    )
    losses: dict[int, float] = {}
    for step, (x, y) in checkpointer.steps(loader(), total=STEPS):
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses[step] = loss.item()
        if step == stop_after < STEPS:
            break
    checkpointer.wait()
    return losses, whole_state(model)


def interrupted(rank: int, world_size: int, folder: str) -> None:
    for name, strategy in {"ddp": fixed(0), "zero3": fixed(3), "tp2": fixed(0, tp=2)}.items():
        own = f"{folder}/{name}"
        torch.manual_seed(3)
        want, weights = train(f"{own}/a", strategy)
        torch.manual_seed(3)
        first, _ = train(f"{own}/b", strategy, stop_after=5)
        torch.manual_seed(4)  # a restarted process starts anywhere
        second, got = train(f"{own}/b", strategy)
        assert list(first) == [1, 2, 3, 4, 5]
        assert list(second) == [5, 6, 7, 8], "the last checkpoint was that of step 4"
        assert {**first, **second} == want
        close(got, weights, 0)
        assert names(f"{own}/b") == ["step-6", "step-8"]


def test_a_resumed_run_repeats_an_uninterrupted_one(tmp_path: Path) -> None:
    run(interrupted, 2, folder=str(tmp_path))


def save_zero3(rank: int, world_size: int, folder: str) -> dict[str, Tensor]:
    model, optimizer, _ = make(fixed(3), "gpt")
    for seed in range(2):
        model(*MODELS["gpt"].batch(4, seed)[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
    autopar.Checkpointer(folder, model, optimizer).save(2, wait=True)
    return whole_state(model)


def go_on(rank: int, world_size: int, folder: str, strategy: Any) -> dict[str, Tensor]:
    model, optimizer, _ = make(strategy, "gpt")
    with torch.no_grad():
        for parameter in model.parameters():
            if not is_remote(parameter):  # of another stage
                parameter.add_(1)
    assert autopar.Checkpointer(folder, model, optimizer).resume() == 2
    model(*MODELS["gpt"].batch(4, 9)[0]).backward()
    optimizer.step()
    return whole_state(model)


@pytest.mark.slow
def test_any_plan_loads_a_checkpoint(tmp_path: Path) -> None:
    folder = str(tmp_path)
    run(save_zero3, 2, folder=folder)
    want = go_on(0, 1, folder, fixed(0))
    pipeline = fixed(0, pp=2, micro_batches=2)
    for strategy in (fixed(0), fixed(0, tp=2), pipeline):
        close(run(go_on, 2, folder=folder, strategy=strategy)[0], want)


def small(folder: Path) -> tuple[torch.nn.Linear, autopar.Checkpointer]:
    model = torch.nn.Linear(3, 2)
    return model, autopar.Checkpointer(folder, model, ADAMW(model.parameters()))


def test_a_broken_checkpoint_is_skipped_and_said(tmp_path: Path) -> None:
    model, checkpointer = small(tmp_path)
    weights = model.weight.detach().clone()
    checkpointer.save(1, wait=True)
    model.weight.data.zero_()
    checkpointer.save(2, wait=True)
    [data] = (tmp_path / "step-2").glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    (tmp_path / "step-3.partial").mkdir()

    with pytest.warns(autopar.CheckpointWarning, match=r"step-2 is skipped: .* has changed"):
        assert checkpointer.resume() == 1
    assert model.weight.equal(weights)
    checkpointer.save(4, wait=True)
    assert not (tmp_path / "step-3.partial").exists()


def test_checkpoints_of_another_run_stay_and_are_older(tmp_path: Path) -> None:
    for step in (1000, 1100):
        small(tmp_path)[1].save(step, wait=True)
    model, checkpointer = small(tmp_path)  # does not resume: a new run
    for step in (1, 2, 1000, 4):
        model.weight.data.fill_(step)
        checkpointer.save(step, wait=True)
    assert names(tmp_path) == ["step-1000", "step-1100", "step-2", "step-4"]
    model, checkpointer = small(tmp_path)
    assert checkpointer.resume() == 4, "the run that began last, whatever its steps"
    assert model.weight.eq(4).all()


def test_a_file_that_could_run_code_is_refused(tmp_path: Path) -> None:
    """The sums are right: whoever can write the folder can write them, too."""
    _, checkpointer = small(tmp_path)
    checkpointer.save(1, wait=True)
    folder = tmp_path / "step-1"
    for name in ("training.pt", ".metadata"):
        content, sums = (folder / name).read_bytes(), (folder / CHECKSUMS).read_bytes()
        if name == "training.pt":
            torch.save({"ranks": print}, folder / name)
        else:
            (folder / name).write_bytes(pickle.dumps(print))
        table = msgspec.json.decode(sums)
        (folder / CHECKSUMS).write_text(json.dumps(table | {name: file_sum(folder / name)}))
        with pytest.raises(autopar.CheckpointError, match=r"may run code|builtins.print"):
            checkpointer.resume()
        (folder / name).write_bytes(content)
        (folder / CHECKSUMS).write_bytes(sums)
    (folder / CHECKSUMS).unlink()
    os.mkfifo(folder / CHECKSUMS)
    with pytest.warns(autopar.CheckpointWarning, match="cannot be read"):
        assert small(tmp_path)[1].resume() == 0


def test_a_state_that_is_no_data_is_an_error_when_it_is_saved(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)

    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"when": Path("x")}

    checkpointer = autopar.Checkpointer(
        tmp_path, model, ADAMW(model.parameters()), extra={"odd": Odd()}
    )
    with pytest.raises(autopar.StrategyError, match=r"extra\['odd'\] holds objects \(PosixPath\)"):
        checkpointer.save(1)


def test_a_checkpoint_holds_the_state_of_its_call(tmp_path: Path) -> None:
    model, checkpointer = small(tmp_path)
    written, save = threading.Event(), background.save

    def held_back(*arguments: Any, **options: Any) -> Any:
        assert written.wait(60)
        return save(*arguments, **options)

    with patch.object(background, "save", held_back):
        for step in (1, 2):  # the second copy reuses the memory of the first
            model.weight.data.fill_(step)
            torch.manual_seed(step)
            written.clear()
            checkpointer.save(step)
            model.weight.data.zero_()
            torch.manual_seed(0)
            written.set()
            checkpointer.wait()
    assert checkpointer.resume() == 2
    assert model.weight.eq(2).all()
    assert torch.initial_seed() == 2


def fails_on_one_rank(rank: int, world_size: int, folder: str, step: int) -> list[str]:
    model, optimizer, _ = make(fixed(0))
    checkpointer = autopar.Checkpointer(folder, model, optimizer)
    at, name = (background, "_sums") if step == 1 else (CheckpointFolder, "publish")
    work = getattr(at, name)

    def failing(*arguments: Any) -> Any:
        if rank == 2 - step:  # sums of rank 1, the name that rank 0 gives
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return work(*arguments)

    said = []
    with patch.object(at, name, failing):
        checkpointer.save(1)
        for call in (lambda: checkpointer.save(2), checkpointer.wait):
            try:
                call()
            except autopar.CheckpointError as error:
                said.append(str(error).replace(folder, ""))
    checkpointer.save(3, wait=True)
    return said


@pytest.mark.parametrize("step", [1, 2])
def test_an_error_beside_training_is_raised_at_the_next_call(tmp_path: Path, step: int) -> None:
    said = run(fails_on_one_rank, 2, folder=str(tmp_path), step=step)
    assert said[0] == said[1]
    assert len(said[0]) == 1
    assert f"rank {2 - step}: OSError: [Errno 28]" in said[0][0]
    assert names(tmp_path) == ["step-3"]


def test_a_checkpoint_of_another_model_is_an_error(tmp_path: Path) -> None:
    small(tmp_path)[1].save(1, wait=True)
    other = torch.nn.Linear(5, 2)
    with pytest.raises(autopar.CheckpointError, match="does not fit this model"):
        autopar.Checkpointer(tmp_path, other, ADAMW(other.parameters())).resume()


def full_disk(rank: int, world_size: int, folder: str) -> list[int]:
    model, optimizer, _ = make(fixed(0))
    checkpointer = autopar.Checkpointer(folder, model, optimizer, every=2)
    done = []
    with pytest.warns(autopar.CheckpointWarning) if rank == 0 else open(os.devnull):
        for step, (x, y) in checkpointer.steps(loader(), total=6):
            model(x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
            done.append(step)
            if step == 3:
                checkpointer.wait()
                # the save after step 4 meets the limit, on rank 1 alone
                limit = 64 if rank == 1 else resource.RLIM_INFINITY
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            if step == 5:
                futures.wait([checkpointer._writer._writing])
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    return done


def test_training_goes_on_when_the_disk_is_full(tmp_path: Path) -> None:
    assert run(full_disk, 2, folder=str(tmp_path)) == [[1, 2, 3, 4, 5, 6]] * 2
    assert names(tmp_path) == ["step-2", "step-6"]


def no_room_to_begin(rank: int, world_size: int, folder: str) -> list[int]:
    model, optimizer, _ = make(fixed(0))
    checkpointer = autopar.Checkpointer(folder, model, optimizer, every=2)
    begin, done = CheckpointFolder.begin, []

    def failing(self: CheckpointFolder, step: int) -> Path:
        if step == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return begin(self, step)

    CheckpointFolder.begin = failing  # type: ignore[method-assign]
    try:
        for step, (x, y) in checkpointer.steps(loader(), total=4):
            model(x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
            done.append(step)
    finally:
        CheckpointFolder.begin = begin  # type: ignore[method-assign]
    return done


def test_training_goes_on_when_a_save_cannot_begin(tmp_path: Path) -> None:
    (tmp_path / "step-9.partial").mkdir()  # of a run that was killed
    assert run(no_room_to_begin, 2, folder=str(tmp_path)) == [[1, 2, 3, 4]] * 2
    assert names(tmp_path) == ["step-4"]


def no_room_at_the_end(rank: int, world_size: int, folder: str) -> float:
    """Rank 0 alone cannot write the last checkpoint at first; returns seconds of the loop."""
    model, optimizer, _ = make(fixed(0))
    checkpointer = autopar.Checkpointer(folder, model, optimizer, every=2)
    sums, tries, begin = background._sums, [], time.monotonic()

    def failing(begun: Path, values: Any) -> Any:
        if rank == 0 and begun.name == "step-4.partial" and len(tries) < 2:
            tries.append(begun)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return sums(begun, values)

    with patch.object(background, "_sums", failing), warnings.catch_warnings():
        warnings.simplefilter("ignore", autopar.CheckpointWarning)
        for _, (x, y) in checkpointer.steps(loader(), total=4):
            model(x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return time.monotonic() - begin


@pytest.mark.slow
def test_the_last_save_is_tried_again(tmp_path: Path) -> None:
    assert max(run(no_room_at_the_end, 2, folder=str(tmp_path))) < 60.0  # of a timeout of 120
    assert names(tmp_path) == ["step-2", "step-4"]


def told_to_stop(rank: int, world_size: int, folder: str) -> None:
    model, optimizer, _ = make(fixed(0))
    checkpointer = autopar.Checkpointer(folder, model, optimizer)
    with pytest.raises(SystemExit) as stop:  # noqa: PT012 (the loop itself ends)
        for step, (x, y) in checkpointer.steps(loader(), total=50):
            if step == 3 and rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            model(x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert stop.value.code == 143
    assert checkpointer.step == 5


@pytest.mark.slow
def test_all_ranks_save_and_leave_together_on_sigterm(tmp_path: Path) -> None:
    run_isolated(told_to_stop, 2, folder=str(tmp_path))
    assert names(tmp_path) == ["step-5"]


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(autopar.CheckpointError, match="cannot be written"):
        small(tmp_path / "file" / "run")
