"""House rules that no tool checks: sizes of files and folders, private torch names, docstrings.

Import contracts are in pyproject.toml, for import-linter.
"""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("passes", "cost_model")
MAX_LINES = 450
MAX_FILES = 16


@dataclass(frozen=True)
class Source:
    """One module: its dotted name, its real file and its syntax tree."""

    name: str
    path: Path
    tree: ast.Module

    def at(self, node: ast.AST) -> str:
        """The position of `node`, as `path:line`."""
        return f"{self.path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


def python_files(folder: Path) -> list[Path]:
    """All .py files under a folder; links are not followed."""
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def dotted_name(path: Path) -> str:
    """`passes/pipeline.py` -> `autopar.passes.pipeline`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] in LINKED:
        parts = ("autopar", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_files() -> list[Path]:
    """The files of autopar, passes and cost_model, each once."""
    linked = tuple(ROOT / "autopar" / name for name in LINKED)
    own = [p for p in python_files(ROOT / "autopar") if not any(map(p.is_relative_to, linked))]
    return own + [path for name in LINKED for path in python_files(ROOT / name)]


def parse(path: Path) -> Source:
    return Source(dotted_name(path), path, ast.parse(path.read_text(), str(path)))


SOURCES = [parse(path) for path in package_files()]
OTHERS = [
    parse(p) for name in ("tests", "benchmarks", "examples") for p in python_files(ROOT / name)
]


# -- files, folders, packages ------------------------------------------------------------------


@pytest.mark.parametrize("name", LINKED)
def test_links_lead_to_the_root_folders(name: str) -> None:
    link, folder = ROOT / "autopar" / name, ROOT / name
    assert not folder.is_symlink(), f"{name}/ is the real folder, autopar/{name} the link"
    assert link.is_symlink(), f"autopar/{name} must be a link, not a copy that shadows {name}/"
    assert link.readlink() == Path("..") / name


def test_files_stay_short() -> None:
    lengths = {source.name: source.path.read_text().count("\n") for source in SOURCES + OTHERS}
    assert not {name: lines for name, lines in lengths.items() if lines > MAX_LINES}


def test_folders_stay_small() -> None:
    """No folder has more files side by side than a reader takes in at once."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is no checkout of git")
    counts: dict[str, int] = {}
    for file in listed.stdout.splitlines():
        folder, _, name = file.rpartition("/")
        if not name.endswith((".py", ".json")):
            continue
        counts[folder] = counts.get(folder, 0) + (name != "__init__.py")
    assert not {folder: count for folder, count in counts.items() if count > MAX_FILES}


IMPORT_ALL = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps({n: getattr(m, "__file__", None) for n, m in list(sys.modules.items())}))
"""


@pytest.mark.slow
def test_no_module_is_imported_twice() -> None:
    names = sorted(source.name for source in SOURCES if not source.name.endswith("__main__"))
    command = [sys.executable, "-c", IMPORT_ALL, *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    loaded: dict[str, str | None] = json.loads(done.stdout.splitlines()[-1])
    bare = [name for name in loaded if name.split(".")[0] in LINKED]
    assert not bare, "imported by the bare name instead of autopar.…"
    names_of: dict[Path, list[str]] = {path: [] for path in package_files()}
    for name, file in loaded.items():
        names_of.get(Path(file or "").resolve(), []).append(name)
    assert not {path: names for path, names in names_of.items() if len(names) > 1}


def test_one_module_gives_warnings() -> None:
    """`warn_once` alone: other warnings would come from every rank, and again."""
    found = {source.name for source in SOURCES if "warnings.warn(" in source.path.read_text()}
    assert found == {"autopar.core.common.notices"}


# -- docstrings --------------------------------------------------------------------------------

VAGUE = ("What", "Where", "Of", "How", "Which", "That")
UNITS = {"_s": r"seconds|\bs\b", "bytes": "bytes|size", "seconds": "seconds"}


def documented(source: Source) -> Iterator[tuple[ast.AST, str]]:
    """Every documented module, class and function, with its docstring."""
    for node in ast.walk(source.tree):
        described = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        if described and (text := ast.get_docstring(node)):
            yield node, text


def entries(text: str) -> Iterator[tuple[str, str]]:
    """The names under Args and Attributes, each with its description."""
    for body in re.findall(r"^(?:Args|Attributes):\n((?: +.*\n|\n)*)", text + "\n", re.MULTILINE):
        yield from re.findall(r"^ {4}(\w+): ((?:.*\n)(?: {5,}.*\n)*)", body, re.MULTILINE)


def test_docstrings_name_their_subject_first() -> None:
    vague = [
        f"{source.at(node)}: {text.splitlines()[0]}"
        for source in SOURCES
        for node, text in documented(source)
        if text.split(maxsplit=1)[0] in VAGUE
    ]
    assert not vague


def test_sizes_have_units() -> None:
    """Args and Attributes whose names mean seconds or bytes say so in words."""
    without = [
        f"{source.at(node)}: {name}: {words}"
        for source in SOURCES
        for node, text in documented(source)
        for name, words in entries(text)
        for ending, unit in UNITS.items()
        if name.endswith(ending) and not re.search(unit, words)
    ]
    assert not without


# -- private torch names -----------------------------------------------------------------------

PRIVATE_TORCH = ("autopar._torch", "autopar._torch_dynamo")


def is_private(name: str) -> bool:
    """Whether a dotted torch name is private; operators under `torch.ops` have names, not rank."""
    parts = name.split(".")
    if parts[:2] == ["torch", "ops"]:
        return False
    hidden = [part for part in parts if part.startswith("_") and not part.startswith("__")]
    return bool(hidden) or parts[:3] == ["torch", "testing", "_internal"]


def torch_aliases(tree: ast.Module) -> dict[str, str]:
    """Local name -> dotted torch name, for every name that an import binds."""
    bound = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return {local: name for local, name in bound.items() if name.split(".")[0] == "torch"}


def dotted_expression(node: ast.expr, aliases: dict[str, str]) -> str | None:
    """`dist._x` -> `torch.distributed._x`; None for what does not start at a torch name."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = dotted_expression(node.value, aliases)
        return owner and f"{owner}.{node.attr}"
    return None


def torch_names(node: ast.AST, aliases: dict[str, str]) -> list[str]:
    """The dotted torch names that one node mentions."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    elif isinstance(node, ast.Attribute):
        names = [dotted_expression(node, aliases) or ""]
    else:
        names = []
    return [name for name in names if name.split(".")[0] == "torch"]


def private_names(source: Source) -> list[str]:
    """Positions at which a module uses private torch names."""
    aliases = torch_aliases(source.tree)
    return [
        f"{source.at(node)}: {name}"
        for node in ast.walk(source.tree)
        for name in torch_names(node, aliases)
        if is_private(name)
    ]


def test_private_torch_names_are_in_two_modules() -> None:
    examples = [source for source in OTHERS if source.name.startswith("examples.")]
    found = {s.name: private_names(s) for s in SOURCES + examples if s.name not in PRIVATE_TORCH}
    assert not {name: where for name, where in found.items() if where}


def sample(name: str, code: str) -> Source:
    return Source(name, ROOT / "sample.py", ast.parse(code))


@pytest.mark.parametrize(
    "code",
    [
        "import torch._dynamo",
        "from torch.distributed import _functional_collectives",
        "from torch.fx._symbolic_trace import Tracer",
        "import torch\ntorch._C._functions",
        "import torch.distributed as dist\ndist._some_group()",
        "from torch import fx\nfx.graph._Namespace()",
    ],
)
def test_private_names_are_found(code: str) -> None:
    assert private_names(sample("autopar.x", code))


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch.ops._c10d_functional.all_reduce",
        "import torch\ntorch.ops.aten._to_copy.default",
        "from torch import nn\nnn.Module.__init__",
        "import other\nother._x",
    ],
)
def test_public_names_are_left_alone(code: str) -> None:
    assert not private_names(sample("autopar.x", code))
