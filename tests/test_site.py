"""The site builds strictly: every page is in the navigation, every link leads somewhere."""

import os
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

ROOT = Path(__file__).resolve().parents[1]


def build_site(folder: Path, **changes: object) -> None:
    """Builds the site strictly; raises Abort after a warning."""
    os.environ["NO_MKDOCS_2_WARNING"] = "1"
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True, **changes))


@pytest.mark.slow
def test_the_site_builds_strictly(tmp_path: Path) -> None:
    build_site(tmp_path)
    command_line = (tmp_path / "reference" / "cli.html").read_text()
    assert "autopar verify gpt.py --nproc 2" in command_line
    assert "memory cap" in command_line
    api = (tmp_path / "reference" / "api.html").read_text()
    assert 'id="autopar.compile"' in api
    assert 'id="autopar.Plan.explain"' in api
    home = (tmp_path / "index.html").read_text()
    assert 'href="quick-start.html"' in home
    assert 'href="repository/examples/from_ddp/before.py"' in home
    assert (tmp_path / "repository" / "examples" / "from_ddp" / "before.py").exists()
    pages = [page for page in tmp_path.rglob("*.html") if "repository" not in page.parts]
    asked = [p.name for p in pages if "https://fonts" in p.read_text() or "cdn." in p.read_text()]
    assert not asked, "a page asks another server"
