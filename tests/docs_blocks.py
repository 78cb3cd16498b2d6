"""Code blocks of the documents: those marked to run, and the files that they need.

A comment before a block marks it:

    <!-- run -->           runs in the test suite
    <!-- run: slow -->     runs in `make docs-check` only
    <!-- file: NAME -->    is written to the page's working folder

Python blocks are files of their own; shell blocks run under `sh -e`, in the same folder, in order.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from autopar import cli

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TIMEOUT_S = 600.0

_BLOCK = re.compile(
    r"^<!-- (run|run: slow|file: [\w.]+) -->\n```(python|bash)\n(.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_MARK = re.compile(r"^<!-- (?:run|file).*-->$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A marked block of a document.

    Attributes:
        kind: "run", "run: slow", or "file: NAME".
        language: "python" or "bash".
        line: line of the document at which it starts.
    """

    kind: str
    language: str
    text: str
    line: int


def blocks(document: Path) -> list[Block]:
    """Marked blocks in order; raises ValueError for a mark without a block."""
    text = document.read_text()
    found = [
        Block(match[1], match[2], match[3], text.count("\n", 0, match.start()) + 1)
        for match in _BLOCK.finditer(text)
    ]
    if len(found) != len(_MARK.findall(text)):
        raise ValueError(f"{document.name}: a mark is not followed by a python or bash block")
    return found


def run(document: Path, folder: Path, slow: bool = False) -> Iterator[tuple[Block, str]]:
    """Runs the blocks of a document; yields each block that fails, and its output.

    Args:
        document: markdown file.
        folder: empty working folder.
        slow: whether to run the slow blocks, too.
    """
    for block in blocks(document):
        if block.kind.startswith("file: "):
            (folder / block.kind.removeprefix("file: ")).write_text(block.text)
        elif block.kind == "run" or slow:
            done = _run(block, folder)
            if done.returncode:
                yield block, done.stdout


def run_here(document: Path, folder: Path) -> None:
    """Runs the quick blocks of a document in this process and working folder; they may raise."""
    for block in blocks(document):
        if block.kind.startswith("file: "):
            (folder / block.kind.removeprefix("file: ")).write_text(block.text)
        elif block.kind == "run" and block.language == "python":
            script = folder / f"block_{block.line}.py"
            script.write_text(block.text)
            runpy.run_path(str(script), run_name="__main__")
        elif block.kind == "run":
            for line in block.text.splitlines():
                command, fails, _ = line.partition("||")
                program, *arguments = shlex.split(command)
                assert program == "autopar", f"{document.name}:{block.line}: mark it as slow"
                status = cli.main(arguments)
                assert bool(status) == bool(fails), f"{line}: exit status {status}"


def _run(block: Block, folder: Path) -> subprocess.CompletedProcess[str]:
    script = folder / f"block_{block.line}.{'py' if block.language == 'python' else 'sh'}"
    script.write_text(block.text)
    command = [sys.executable] if block.language == "python" else ["sh", "-e"]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    modules = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [*command, str(script)],
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONPATH": modules, "OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=TIMEOUT_S,
        check=False,
    )


def main() -> int:
    """`python -m tests.docs_blocks`: runs every marked block; prints the failures."""
    failed = 0
    for document in DOCUMENTS:
        if not any(block.kind.startswith("run") for block in blocks(document)):
            continue
        with tempfile.TemporaryDirectory() as folder:
            bad = list(run(document, Path(folder), slow=True))
        print(f"{document.relative_to(ROOT)}: {'FAIL' if bad else 'ok'}", flush=True)
        for block, output in bad:
            failed += 1
            print(f"line {block.line}:\n{output}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
