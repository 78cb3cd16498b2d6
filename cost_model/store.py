"""What is kept on disk between runs: small JSON files, written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopar.errors import MeasurementWarning
from autopar.notices import warn_once


def cache_directory() -> Path:
    """`$AUTOPAR_CACHE`, or `~/.cache/autopar`."""
    named = os.environ.get("AUTOPAR_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "autopar"


def digest(facts: Mapping[str, Any]) -> str:
    """A short name for a set of facts: equal facts, equal name."""
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def read_json(path: Path) -> Any:
    """The content of `path`, or None if there is none or it is not JSON."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def write_json(path: Path, data: Any) -> None:
    """Write `data` to `path` so that a reader sees the old file or the new one, never a part.

    A cache that cannot be written costs time, not correctness: it warns.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(data, file)
            os.replace(draft, path)
        except BaseException:
            os.unlink(draft)
            raise
    except OSError as error:
        warn_once(MeasurementWarning, f"autopar could not keep its measurements in {path}: {error}")
