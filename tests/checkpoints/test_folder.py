"""A folder of checkpoints loses none that is whole, and serves one job at a time."""

import contextlib
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest

from autopar.checkpoints.folder import CheckpointFolder, Stamp, faults_of, sums_of


def test_a_second_job_is_told(tmp_path: Path) -> None:
    lock = "CheckpointFolder(Path(sys.argv[1])).lock()"
    code = f"import sys; from autopar.checkpoints.folder import *; {lock}"
    command = [sys.executable, "-c", code, str(tmp_path)]
    assert not subprocess.run(command, check=False).returncode
    with CheckpointFolder(tmp_path).lock():
        second = subprocess.run(command, check=False, capture_output=True, text=True)
    assert "CheckpointError: another job saves into" in second.stderr


class Killed(BaseException):
    """The end of the process."""


def killed_after(renames: int) -> Callable[[Path, Path], Path]:
    """A `Path.rename` that works so often, and then kills the process."""
    rename, done = Path.rename, []

    def or_killed(self: Path, target: Path) -> Path:
        done.append(target)
        if len(done) > renames:
            raise Killed
        return rename(self, target)

    return or_killed


def save(folder: CheckpointFolder, step: int, text: str, stamp: Stamp, keep: int) -> None:
    begun = folder.begin(step)
    (begun / "data").write_text(text)
    folder.publish(step, sums_of(begun, ["data"]), stamp)
    folder.prune(keep, stamp.run, ())


@pytest.mark.parametrize("seed", range(6))
def test_the_last_whole_checkpoint_survives_any_history(tmp_path: Path, seed: int) -> None:
    """Runs save, are killed at a rename, begin anew, and find files short."""
    draw, folder = random.Random(seed), CheckpointFolder(tmp_path)
    run, number, last = "run-0", 1, {}  # text of the last whole checkpoint of each run
    for event in range(80):
        own = [each for each in folder.saved() if each.stamp.run == run]
        whole = [each for each in own if not faults_of(each.path, 0, 1)]
        assert [(each.path / "data").read_text() for each in whole][:1] == last.get(run, [])
        match draw.choice(["save"] * 4 + ["kill", "break", "begin anew"]):
            case "begin anew":
                run, number = f"run-{event}", number + 1
            case "break" if len(whole) > 1:
                os.truncate(whole[1].path / "data", 0)
            case "save" | "kill" as kind:
                step, keep = draw.randrange(8), draw.randrange(1, 4)
                for other in folder.saved():  # runs do not overwrite each other here
                    if other.step == step and other.stamp.run != run:
                        step += 10 * number
                stamp = Stamp(run, number, max((each.stamp.save for each in own), default=0) + 1)
                renames = draw.randrange(2) if kind == "kill" else 9
                with (
                    contextlib.suppress(Killed),
                    patch.object(Path, "rename", killed_after(renames)),
                ):
                    save(folder, step, str(event), stamp, keep)
                if folder.saved()[0].stamp == stamp:
                    last[run] = [str(event)]
                if kind == "save":
                    before = sum(each.step != step for each in whole)
                    after = [each for each in folder.saved() if each.stamp.run == run]
                    after = [each for each in after if not faults_of(each.path, 0, 1)]
                    assert len(after) == min(keep, before + 1), "broken ones do not count"
