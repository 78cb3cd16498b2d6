"""The quick code blocks of README and docs run; `make docs-check` runs the slow ones, too."""

from pathlib import Path

import pytest

from tests.docs_blocks import DOCUMENTS, blocks, run_here

RUNNABLE = [path for path in DOCUMENTS if any(block.kind == "run" for block in blocks(path))]


@pytest.mark.parametrize("document", RUNNABLE, ids=lambda path: path.name)
def test_blocks_run(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_here(document, tmp_path)


def test_a_mark_without_a_block_is_told(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- run -->\n```text\nnothing\n```\n")
    with pytest.raises(ValueError, match="is not followed"):
        blocks(page)
