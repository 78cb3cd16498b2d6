"""The documents name only paths and modules that exist, no replaced name, in short sentences."""

import pkgutil
import re
from pathlib import Path

import pytest

from tests.harness.prose import MOST_WORDS, documents, sentences, words

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
]
FOLDERS = "autopar|passes|cost_model|tests|benchmarks|docs|examples"
PATH = re.compile(rf"(?<![\w/.-])((?:{FOLDERS})/[\w/.*-]*)")
MODULE = re.compile(r"(?<![\w./])((?:autopar|benchmarks)\.(?!md\b)[a-z_][\w.]*)")
LINK = re.compile(r"\]\((?!https?:)([^)#]+)\)")
REPLACED = [
    "as_placed",
    "data_ranks",
    "tensor_ranks",
    "pipeline_ranks",
    "--cuts",
    "RowWeight",
    "bucket_sums",
    "own_softmax",
    "planner/decide",
    "planner/outline",
    "planner/search.py",
    "program_text.py",
    "Plan.cuts",
    "Strategy.cuts",
]


def found(pattern: re.Pattern[str], document: Path) -> list[str]:
    """Matches in a document, without the punctuation behind them."""
    return [match.rstrip(".,:") for match in pattern.findall(document.read_text())]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_paths_exist(document: Path) -> None:
    missing = [
        path
        for path in found(PATH, document)
        if "FAMILY" not in path and not list(ROOT.glob(path.rstrip("/")))
    ]
    links = [link for link in found(LINK, document) if not (document.parent / link).exists()]
    assert missing + links == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_modules_exist(document: Path) -> None:
    assert [name for name in found(MODULE, document) if not exists(name)] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_no_replaced_names(document: Path) -> None:
    text = document.read_text()
    assert [name for name in REPLACED if name in text] == []


@pytest.mark.parametrize("document", documents(), ids=lambda path: path.name)
def test_sentences_are_short(document: Path) -> None:
    """`python -m tests.harness.prose --long` lists them for all documents."""
    text = document.read_text()
    assert [line for line in sentences(text) if words(line) > MOST_WORDS] == []


def test_the_site_is_small() -> None:
    """At most 24 pages are for users; those of "Internals" are for people who change the code."""
    text = (ROOT / "mkdocs.yml").read_text()
    users, _, internals = text.partition("\nnav:\n")[2].partition("  - Internals:")
    assert internals
    assert len(re.findall(r"\.md$", users, re.MULTILINE)) <= 24


def exists(name: str) -> bool:
    """Whether a dotted name is a module, or an attribute of one."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True
