"""Code blocks of the documents: each runs, or says why not.

A comment before a python or bash block marks it:

    <!-- run -->              runs in the test suite
    <!-- run: slow -->        runs in `make docs-check` only
    <!-- file: NAME -->       is written to the page's working folder
    <!-- not run: REASON -->  does not run

Python blocks are files of their own; shell blocks run under `sh -e`, in the same folder, in order.
Comments that readers do not see give what a block needs:

    <!-- given              Python that precedes the next block
    import torch
    -->
    <!-- given: NAME -->    the same, from tests/docs_given/NAME.py
    <!-- given: NAME.py     a file of the page's working folder
    import torch
    -->
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from autopar.cli.main import main as run_command

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
GIVEN = ROOT / "tests" / "docs_given"
TIMEOUT_S = 900.0

_BLOCK = re.compile(
    r"^(?P<indent> *)(?:<!-- given: (?P<named>\w+) -->\n *)?"
    r"(?:<!-- given\n(?P<given>(?:(?!-->).)*)-->\n *)?"
    r"<!-- (?P<kind>run|run: slow|file: [\w.]+|not run: [^\n]+) -->\n"
    r"(?P=indent)```(?P<language>python|bash)\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
_GIVEN = re.compile(r"^<!-- given: (\w+\.\w+)\n(.*?)^-->$", re.MULTILINE | re.DOTALL)
_FENCE = re.compile(r"^ *```(\w*)\n.*?^ *```$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"^ *<!-- (?:run|file|not run).*-->$", re.MULTILINE)
_RUNNABLE = ("python", "bash")


@dataclass(frozen=True)
class Block:
    """A marked block of a document.

    Attributes:
        kind: "run", "run: slow", "file: NAME" or "not run: REASON".
        language: "python" or "bash".
        line: line of the document at which it starts.
    """

    kind: str
    language: str
    text: str
    line: int


def blocks(document: Path) -> list[Block]:
    """Marked blocks in order.

    Raises:
        ValueError: A block has no mark or no language, or a mark no block.
    """
    text = document.read_text()
    found = [_block(match, text) for match in _BLOCK.finditer(text)]
    languages = [match[1] for match in _FENCE.finditer(text)]
    if "" in languages:
        raise ValueError(f"{document.name}: a block has no language; text is one, too")
    marks = len(_MARK.findall(text))
    if not len(found) == marks == sum(language in _RUNNABLE for language in languages):
        raise ValueError(
            f"{document.name}: {marks} marks for {len(found)} of the python and bash blocks; "
            "tests/harness/docs_blocks.py lists the marks"
        )
    return found


def _block(match: re.Match[str], text: str) -> Block:
    named = (GIVEN / f"{match['named']}.py").read_text() if match["named"] else ""
    code = named + textwrap.dedent(match["given"] or "") + textwrap.dedent(match["text"])
    return Block(match["kind"], match["language"], code, text.count("\n", 0, match.start()) + 1)


def prepare(document: Path, folder: Path) -> None:
    """Writes the files that a document's blocks are given; examples/ is a link."""
    (folder / "examples").symlink_to(ROOT / "examples")
    for name, text in _GIVEN.findall(document.read_text()):
        (folder / name).write_text(text)


def run(document: Path, folder: Path, slow: bool = False) -> Iterator[tuple[Block, str]]:
    """Runs the blocks of a document; yields each block that fails, and its output.

    Args:
        document: markdown file.
        folder: empty working folder.
        slow: whether to run the slow blocks, too.
    """
    prepare(document, folder)
    for block in blocks(document):
        if block.kind.startswith("file: "):
            (folder / block.kind.removeprefix("file: ")).write_text(block.text)
        elif block.kind == "run" or (slow and block.kind == "run: slow"):
            done = _run(block, folder)
            if done.returncode:
                yield block, done.stdout


def run_here(document: Path, folder: Path) -> None:
    """Runs the quick blocks of a document in this process and working folder; they may raise."""
    prepare(document, folder)
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
                status = run_command(arguments)
                assert bool(status) == bool(fails), f"{line}: exit status {status}"


def _run(block: Block, folder: Path) -> subprocess.CompletedProcess[str]:
    script = folder / f"block_{block.line}.{'py' if block.language == 'python' else 'sh'}"
    script.write_text(block.text)
    command = [sys.executable] if block.language == "python" else ["sh", "-e"]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    modules = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    try:
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
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, f"longer than {TIMEOUT_S:.0f} s")


def main() -> int:
    """`python -m tests.harness.docs_blocks [FILE ...]`: runs every block; prints the failures."""
    failed, count = 0, Counter[str]()
    wanted = [Path(name).resolve() for name in sys.argv[1:]] or DOCUMENTS
    for document in wanted:
        found = blocks(document)
        count.update("run" if b.kind.startswith("run") else b.kind.split(":")[0] for b in found)
        if not any(block.kind.startswith("run") for block in found):
            continue
        with tempfile.TemporaryDirectory() as folder:
            bad = list(run(document, Path(folder), slow=True))
        print(f"{document.relative_to(ROOT)}: {'FAIL' if bad else 'ok'}", flush=True)
        for block, output in bad:
            failed += 1
            print(f"line {block.line}:\n{output}", flush=True)
    print(", ".join(f"{number} {kind}" for kind, number in count.items()))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
