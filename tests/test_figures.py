"""Figures of the documents are those of the kept results; a wrong one, or one too few, is told."""

import json
from pathlib import Path

import pytest

from tests.harness import figures
from tests.harness.prose import documents

RESULT = {"rows": [{"model": "gpt", "ratio": 0.8449}, {"model": "conv", "ratio": 1.071}]}


@pytest.mark.parametrize("document", documents(), ids=lambda path: path.name)
def test_figures_are_those_of_results(document: Path) -> None:
    assert figures.differences(document) == []


@pytest.mark.parametrize("name", ["README.md", "benchmarks.md"])
def test_results_are_named(name: str) -> None:
    (document,) = (path for path in documents() if path.name == name)
    assert figures.marks(document) >= 3


@pytest.mark.parametrize(
    ("queries", "block", "told"),
    [
        ("rows[model=gpt].ratio\nrows[model=conv].ratio", "0.84", ""),
        ("rows[model=gpt].ratio\nrows[model=conv].ratio", "0.85", "are not those of"),
        ("rows[model=gpt].ratio\n- not kept", "0.84", ""),
        ("= rows[model=$1].ratio *100\ngpt\nconv", "84 %", "are not those of"),
        ("rows[model=gpt].ratio", "0.84", "1 lines for 2 rows"),
        ("max rows.ratio; min rows.ratio\n-", "1.07 / 0.84", ""),
    ],
)
def test_tables(tmp_path: Path, queries: str, block: str, told: str) -> None:
    table = f"| model | ratio |\n|---|---|\n| GPT | {block} |\n| conv | 1.07 |"
    found = differences_of(tmp_path, queries, table)
    assert told in found if told else not found


@pytest.mark.parametrize(
    ("sentence", "agrees"),
    [
        ("Of 2 models, the worst takes 1.07 of\nDDP's step, the best 0.84.", True),
        ("Of 2 models, the best takes 0.84 of\nDDP's step, the worst 1.07.", False),
        ("Of 2 models, the worst takes 1.08, the best 0.84.", False),
    ],
)
def test_paragraphs(tmp_path: Path, sentence: str, agrees: bool) -> None:
    queries = "count rows.ratio; max rows.ratio; min rows.ratio"
    found = differences_of(tmp_path, queries, sentence)
    assert ("in this order" in found) == (not agrees)


def test_a_query_that_finds_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing at"):
        differences_of(tmp_path, "rows[model=t5].ratio", "The ratio is 1.")


def differences_of(folder: Path, queries: str, block: str) -> str:
    result, page = folder / "result.json", folder / "page.md"
    result.write_text(json.dumps(RESULT))
    page.write_text(f"# Title\n\n<!-- from {result}\n{queries}\n-->\n\n{block}\n\nThe end.\n")
    return "\n".join(figures.differences(page))
