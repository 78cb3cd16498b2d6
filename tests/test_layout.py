"""The house rules: where files lie, who may import whom, where private torch names may stand."""

import ast
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("passes", "cost_model")
MAX_LINES = 450

GROUND = frozenset(
    {
        "autopar.plan.compression",
        "autopar._torch",
        "autopar.common.checks",
        "autopar.common.containers",
        "autopar.common.documents",
        "autopar.errors",
        "autopar.ir.graph",
        "autopar.ir.mesh_levels",
        "autopar.common.notices",
        "autopar.ir.placement",
        "autopar.formatting",
    }
)
COST_MODEL = GROUND | {"autopar.cost_model"}
PASSES = COST_MODEL | {"autopar.passes"}
PREDICTED = {
    "autopar.report.error_bars",
    "autopar.plan.report_data",
    "autopar.plan.prediction",
    "autopar.plan.throughput",
}
PARTS = PREDICTED | {"autopar.plan.partition", "autopar.plan.pipeline", "autopar.plan.reader"}
TEXTS = {"autopar.report.table", "autopar.report.explain", "autopar.report.diff"}
PLAN = PASSES | PARTS | TEXTS | {"autopar.plan", "autopar.plan.strategy"}
TRACING = {
    "autopar.capture.joint",
    "autopar.capture.provenance",
    "autopar.capture.repeated_blocks",
    "autopar.capture.expand_blocks",
    "autopar.capture.traceable",
}
PYTHON_STATE = {
    "autopar.capture.state.cells",
    "autopar.capture.state.contents",
    "autopar.capture.state.counting",
    "autopar.capture.state.effects",
    "autopar.capture.state.fingerprints",
    "autopar.capture.state.guards",
    "autopar.capture.state.outside",
    "autopar.capture.state.side_effects",
}
PLAN_AND_CAPTURE = (
    PLAN
    | TRACING
    | PYTHON_STATE
    | {
        "autopar.capture.batch_slices",
        "autopar.capture.call",
        "autopar.capture",
        "autopar.passes.stage_lowering",
    }
)

MAY_IMPORT = {
    **dict.fromkeys(GROUND, GROUND),
    "autopar.cost_model": COST_MODEL,
    "autopar.passes": PASSES,
    "autopar.capture.traceable": GROUND,
    "autopar.capture.provenance": GROUND | {"autopar.capture.traceable"},
    "autopar.capture.checked_linalg": GROUND,
    "autopar.capture.joint": GROUND
    | {"autopar.capture.checked_linalg", "autopar.capture.provenance"},
    "autopar.capture.repeated_blocks": GROUND,
    "autopar.capture.expand_blocks": GROUND | {"autopar.capture.repeated_blocks"},
    **dict.fromkeys(PYTHON_STATE, GROUND | PYTHON_STATE | {"autopar.capture.provenance"}),
    "autopar.capture.call": GROUND,
    "autopar.capture": GROUND
    | TRACING
    | PYTHON_STATE
    | {"autopar.capture.call", "autopar.capture"},
    "autopar.capture.batch_slices": PASSES | {"autopar.capture.call", "autopar.capture"},
    "autopar.plan.partition": PASSES,
    "autopar.plan.pipeline": GROUND,
    "autopar.plan.report_data": COST_MODEL,
    "autopar.plan.throughput": COST_MODEL,
    "autopar.plan.prediction": COST_MODEL | {"autopar.plan.report_data", "autopar.plan.throughput"},
    "autopar.report.error_bars": PREDICTED,
    "autopar.plan.reader": PASSES | PARTS,
    "autopar.plan.strategy_fields": PASSES | PARTS,
    "autopar.plan.strategy": PASSES | PARTS | {"autopar.plan.strategy_fields"},
    "autopar.plan": PLAN | {"autopar.report"},
    **dict.fromkeys(TEXTS, PLAN),
    "autopar.passes.stage_lowering": PLAN,
    "autopar.planner": PLAN_AND_CAPTURE | {"autopar.planner"},
    "autopar.runtime": PLAN_AND_CAPTURE | {"autopar.runtime"},
    "autopar.report": PLAN_AND_CAPTURE | {"autopar.report"},
}
"""Room -> the rooms it may import. A module of no room here is on top: it may import everything,
and only others on top may import it."""


@dataclass(frozen=True)
class Source:
    """One module of the package: its dotted name, its real file and its syntax tree."""

    name: str
    path: Path
    tree: ast.Module

    def at(self, node: ast.stmt | ast.expr) -> str:
        """Where `node` stands, as `path:line`."""
        return f"{self.path.relative_to(ROOT)}:{node.lineno}"


def python_files(folder: Path) -> list[Path]:
    """All .py files under a folder; links are not followed."""
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def dotted_name(path: Path) -> str:
    """`passes/bucket.py` -> `autopar.passes.bucket`."""
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
MODULES = frozenset(source.name for source in SOURCES)


# -- links and packages ------------------------------------------------------------------------


@pytest.mark.parametrize("name", LINKED)
def test_links_lead_to_the_root_folders(name: str) -> None:
    link, folder = ROOT / "autopar" / name, ROOT / name
    assert not folder.is_symlink(), f"{name}/ is the real folder, autopar/{name} the link"
    assert link.is_symlink(), f"autopar/{name} must be a link, not a copy that shadows {name}/"
    assert link.readlink() == Path("..") / name


def test_every_package_on_disk_is_listed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {path.parent for path in package_files()}
    folders |= {path.parent for path in (ROOT / "cost_model").rglob("*.json")}
    on_disk = {dotted_name(folder / "__init__.py") for folder in folders}
    assert on_disk <= set(settings["packages"])
    assert settings["package-dir"] == {f"autopar.{name}": name for name in LINKED}


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_files_stay_short(source: Source) -> None:
    lines = source.path.read_text().count("\n")
    assert lines <= MAX_LINES, f"{source.path} has {lines} lines: redesign the room"


# -- importing everything ----------------------------------------------------------------------

IMPORT_ALL = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps({n: getattr(m, "__file__", None) for n, m in list(sys.modules.items())}))
"""


def test_no_module_is_imported_twice() -> None:
    names = sorted(name for name in MODULES if not name.endswith("__main__"))
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


# -- imports run downwards ---------------------------------------------------------------------


def is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test).removeprefix("typing.") == "TYPE_CHECKING"


def runtime_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes under `node`, bodies of `if TYPE_CHECKING:` left out."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and is_type_checking(child.test):
            for other in child.orelse:
                yield from runtime_nodes(other)
        else:
            yield from runtime_nodes(child)


def imported_modules(node: ast.AST, modules: frozenset[str]) -> list[str]:
    """The autopar modules that one import statement names."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module:
        full = [f"{node.module}.{alias.name}" for alias in node.names]
        names = [name if name in modules else node.module for name in full]
    else:
        names = []
    return [name for name in names if name.split(".")[0] == "autopar"]


def room(module: str) -> str:
    """The room a module lives in; empty for those on top."""
    while module and module not in MAY_IMPORT:
        module = module.rpartition(".")[0]
    return module


def upward_imports(source: Source, modules: frozenset[str]) -> list[str]:
    """The imports of a module that its room does not allow."""
    allowed = MAY_IMPORT.get(room(source.name))
    if allowed is None:
        return []
    return [
        f"{source.at(node)}: {source.name} imports {name}"
        for node in runtime_nodes(source.tree)
        for name in imported_modules(node, modules)
        if room(name) not in allowed
    ]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_imports_run_downwards(source: Source) -> None:
    assert not upward_imports(source, MODULES)


# -- private torch names -----------------------------------------------------------------------

PRIVATE_TORCH = "autopar._torch"


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
    """Where a module uses private torch names."""
    aliases = torch_aliases(source.tree)
    return [
        f"{source.at(node)}: {name}"
        for node in ast.walk(source.tree)
        for name in torch_names(node, aliases)
        if is_private(name)
    ]


EXAMPLES = [parse(path) for path in python_files(ROOT / "examples")]


@pytest.mark.parametrize("source", SOURCES + EXAMPLES, ids=lambda source: source.name)
def test_private_torch_names_stand_in_one_module(source: Source) -> None:
    if source.name != PRIVATE_TORCH:
        assert not private_names(source)


# -- warnings --------------------------------------------------------------------------------------

GIVES_WARNINGS = "autopar.common.notices"


def test_one_module_gives_warnings() -> None:
    """`warn_once` alone: other warnings would come from every rank, and again."""
    found = {source.name for source in SOURCES if "warnings.warn(" in source.path.read_text()}
    assert found == {GIVES_WARNINGS}


# -- the checks themselves ---------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("autopar.ir.graph", "import autopar.plan"),
        ("autopar.cost_model.curve", "from autopar.passes.bucket import Bucket"),
        ("autopar.passes.bucket", "def f():\n    from autopar import plan"),
        ("autopar.capture", "from autopar.passes import runner"),
        ("autopar.runtime.module", "from autopar.planner.search import choose"),
        ("autopar.plan", "from autopar import compile"),
    ],
)
def test_upward_imports_are_found(name: str, code: str) -> None:
    assert upward_imports(
        sample(name, code), frozenset({"autopar.plan", "autopar.passes.core.runner"})
    )


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("autopar.passes.bucket", "from autopar.cost_model.curve import Curve"),
        ("autopar.planner.search.config_search", "from autopar.planner import stages"),
        ("autopar.api", "from autopar.runtime.module import DistributedModule"),
        ("autopar.plan", "if TYPE_CHECKING:\n    from autopar.planner import search"),
    ],
)
def test_downward_imports_are_left_alone(name: str, code: str) -> None:
    assert not upward_imports(
        sample(name, code), frozenset({"autopar.planner.evaluate.stage_partition"})
    )
