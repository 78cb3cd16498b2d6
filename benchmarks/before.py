"""Unpacks an earlier commit as the package `autopar_before`, a contender in the same processes.

python -m benchmarks.before COMMIT FOLDER
PYTHONPATH=FOLDER python -m benchmarks.peers --contenders before-ddp,autopar-ddp
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

NAME = "autopar_before"


def unpack(commit: str, folder: Path) -> None:
    """Write the package of a commit, renamed, with its data files."""
    archive = subprocess.run(["git", "archive", commit], check=True, capture_output=True)
    with tempfile.TemporaryDirectory() as checkout:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
            tar.extractall(checkout, filter="tar")
        package = shutil.copytree(Path(checkout, "autopar"), folder / NAME, dirs_exist_ok=True)
    for path in package.rglob("*.py"):
        path.write_bytes(re.sub(rb"\bautopar\b", NAME.encode(), path.read_bytes()))


if __name__ == "__main__":
    unpack(sys.argv[1], Path(sys.argv[2]))
