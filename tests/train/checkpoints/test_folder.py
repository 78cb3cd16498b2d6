"""A folder of checkpoints loses none that is whole, and serves one job at a time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.errors import CheckpointError
from autopar.train.checkpoints.folder import (
    CHECKSUMS,
    LOCK,
    VALUES,
    CheckpointFolder,
    Stamp,
    faults_of,
    sums_of,
)
from autopar.train.checkpoints.torch_index import INDEX
from benchmarks.trust.histories import run_history


def test_a_second_job_is_told(tmp_path: Path) -> None:
    lock = "CheckpointFolder(Path(sys.argv[1])).lock()"
    code = f"import sys; from autopar.train.checkpoints.folder import *; {lock}"
    command = [sys.executable, "-c", code, str(tmp_path)]
    assert not subprocess.run(command, check=False).returncode
    with CheckpointFolder(tmp_path).lock():
        (tmp_path / LOCK).read_text()  # as a backup does; a POSIX lock would end with it
        with CheckpointFolder(tmp_path).lock():
            pass  # another Checkpointer of this process
        second = subprocess.run(command, check=False, capture_output=True, text=True)
    assert "CheckpointError: another job saves into" in second.stderr


def test_a_folder_that_was_deleted_is_locked_anew(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    with folder.lock() as first:
        (tmp_path / LOCK).unlink()
        with folder.lock(first) as second:
            assert second is not first
            assert folder.lock(second) is second


def test_a_pipe_is_no_lock(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / LOCK)
    with pytest.raises(CheckpointError, match="no regular file"):
        CheckpointFolder(tmp_path).lock()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_the_newest_whole_checkpoint_survives_any_history(tmp_path: Path, seed: int) -> None:
    assert not run_history(f"{seed}", tmp_path)


def test_json_that_is_too_deep_is_a_fault(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2):
        _save(folder, step)
    for name in ("checksums.json", "run.json"):
        (folder.of_step(2) / name).write_text('{"a":' * 100_000)
        newest, *_ = [it for it in folder.saved() if not faults_of(it.path, 0, 1)]
        assert newest.step == 1


def test_a_file_without_end_is_not_read(tmp_path: Path) -> None:
    """Four terabytes of holes take hours to sum."""
    folder = CheckpointFolder(tmp_path)
    _save(folder, 1)
    os.truncate(folder.of_step(1) / VALUES, 1 << 42)
    fault = "training.pt has 4398046511104 bytes instead of 4"
    assert faults_of(folder.of_step(1), 0, 1) == [fault]


def test_a_checkpoint_without_its_index_is_not_whole(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2, 3):
        _save(folder, step)
    (folder.of_step(3) / CHECKSUMS).write_text("{}")
    (folder.of_step(2) / INDEX).unlink()
    assert [it.step for it in folder.saved() if not faults_of(it.path, 0, 1)] == [1]
    folder.prune(1, "run", ())
    assert folder.of_step(1).exists()


def test_a_file_in_the_way_is_deleted(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.partial_of(1).write_text("")
    _save(folder, 1)
    assert not faults_of(folder.of_step(1), 0, 1)


def _save(folder: CheckpointFolder, step: int) -> None:
    begun = folder.begin(step)
    for name in (INDEX, VALUES):
        (begun / name).write_text("data")
    folder.publish(step, sums_of(begun, [INDEX, VALUES]), Stamp("run", 1, step))
