"""The cache on disk: small JSON files, written atomically and ignored if damaged."""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from autopar.common.notices import warn_once
from autopar.errors import MeasurementWarning

T = TypeVar("T")

_DAMAGED = (
    OSError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


def cache_directory() -> Path:
    """`$AUTOPAR_CACHE`, or `~/.cache/autopar`."""
    named = os.environ.get("AUTOPAR_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "autopar"


def digest(facts: Mapping[str, Any]) -> str:
    """A short hash of a set of facts."""
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def read_cached(path: Path, parse: Callable[[Any], T]) -> T | None:
    """The parsed content of a file, or None if there is no such file.

    A damaged file counts as absent, with a warning once a process. `parse` raises an ordinary
    error, such as KeyError or ValueError, for one.
    """
    try:
        return parse(json.loads(path.read_text()))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except _DAMAGED as error:
        why = f"{type(error).__name__}: {str(error)[:200]}"
        warn_once(
            MeasurementWarning,
            f"autopar ignores {path}, a file of its cache that is damaged ({why}), and "
            "measures again. It will be replaced.",
        )
        return None


def check_numbers(data: Any) -> dict[str, Any]:
    """The table, if it has finite, non-negative numbers by name; otherwise a ValueError."""
    if not isinstance(data, dict):
        raise ValueError(f"a table is expected, not {str(data)[:40]!r}")
    for name, value in data.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{name[:80]!r} is no number: {str(value)[:40]!r}")
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name[:80]!r} is {value}")
    return data


def writes_for_host() -> bool:
    """Whether this process writes what all ranks of a host measure: torchrun's first on it does."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def write_json(path: Path, data: Any) -> None:
    """Writes `data` to `path` atomically; warns if that fails."""
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
