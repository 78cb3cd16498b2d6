import tempfile
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _reproducers_are_thrown_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes that fail on purpose leave their files with the test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
