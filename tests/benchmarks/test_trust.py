"""A random part of the trust benchmark, and what it must notice."""

import os
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest

from autopar.train.checkpoints.folder import CheckpointFolder
from benchmarks.trust.__main__ import main
from benchmarks.trust.histories import run_history
from benchmarks.trust.reading import read_broken
from benchmarks.trust.samples import SAMPLES, Sample


@pytest.mark.slow
def test_broken_files_and_killed_runs_lose_nothing() -> None:
    """The seed repeats it by hand."""
    seed = random.SystemRandom().randrange(1 << 20)
    options = ["--seed", str(seed), "--files", "60", "--histories", "6"]
    assert main(options) == 0, f"python -m benchmarks.trust {' '.join(options)}"


def _hang(folder: Path) -> None:
    pipe = folder / "pipe"
    if not pipe.exists():  # the second try finds it
        os.mkfifo(pipe)
    pipe.read_bytes()


BAD_READERS: dict[str, Callable[[Path], object]] = {
    "code": lambda folder: os.system("true"),
    "raw": lambda folder: {}["absent"],
    "hung": _hang,
    "lost": lambda folder: (folder / "other").unlink(),
}


@pytest.mark.parametrize("outcome", BAD_READERS)
def test_bad_readers_are_noticed(outcome: str) -> None:
    def make(folder: Path) -> None:
        for name in ("file", "other"):
            (folder / name).write_text("good")

    def read(folder: Path) -> None:
        if (folder / "file").read_text() != "good":
            BAD_READERS[outcome](folder)

    with (
        tempfile.TemporaryDirectory() as top,  # which anybody may look into
        patch.dict(SAMPLES, {outcome: Sample(make, read, "file")}, clear=True),
        patch("benchmarks.trust.reading.mutate", lambda path, _: path.write_text("broken")),
        patch("benchmarks.trust.reading.LIMIT_S", 2.0),
    ):
        os.chmod(top, 0o755)
        folder = Path(top, "case")
        folder.mkdir()
        assert read_broken(0, 0, folder).outcome == outcome


def _prune_newest(folder: CheckpointFolder, *_: object) -> None:
    for each in folder.saved()[:1]:
        shutil.rmtree(each.path)


def test_lost_checkpoints_are_noticed(tmp_path: Path) -> None:
    with patch.object(CheckpointFolder, "prune", _prune_newest):
        assert run_history("0", tmp_path)
