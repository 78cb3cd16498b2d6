"""The quick code blocks of README and docs run; `make docs-check` runs the slow ones, too."""

from pathlib import Path

import pytest

from tests.harness.docs_blocks import DOCUMENTS, blocks, run_here

RUNNABLE = [path for path in DOCUMENTS if any(block.kind == "run" for block in blocks(path))]


@pytest.mark.slow
@pytest.mark.parametrize("document", RUNNABLE, ids=lambda path: path.name)
def test_blocks_run(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_here(document, tmp_path)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_block_is_marked(document: Path) -> None:
    blocks(document)


@pytest.mark.parametrize(
    "text",
    [
        "<!-- run -->\n```text\nnothing\n```\n",
        "```python\nnothing\n```\n",
        "```\nnothing\n```\n",
    ],
)
def test_marks_and_blocks_without_each_other_are_told(tmp_path: Path, text: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(ValueError, match=r"page\.md"):
        blocks(page)
