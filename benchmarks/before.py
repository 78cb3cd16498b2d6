"""An earlier commit under the name `autopar_before`, to race against in the same processes.

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
    with tempfile.TemporaryDirectory() as whole:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
            tar.extractall(whole, filter="tar")
        package = shutil.copytree(Path(whole, "autopar"), folder / NAME, dirs_exist_ok=True)
    for path in package.rglob("*.py"):
        path.write_bytes(renamed(path.read_bytes()))


def renamed(source: bytes) -> bytes:
    """Source code that imports, and registers operators, under the other name."""
    return re.sub(rb"\bautopar\b", NAME.encode(), source)


if __name__ == "__main__":
    unpack(sys.argv[1], Path(sys.argv[2]))
