"""The cache on disk: small JSON files, written atomically, named by a hash of what they depend on.

A file that is damaged or cannot be read is ignored, with a warning. Users may share a folder by
`AUTOPAR_CACHE`: files have the rights that the umask leaves.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from autopar.core.common.files import read_json
from autopar.core.common.notices import warn_once
from autopar.errors import MeasurementWarning

T = TypeVar("T")

_DAMAGED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)


def cache_directory() -> Path:
    """`$AUTOPAR_CACHE`, or `~/.cache/autopar`.

    Raises:
        FileNotFoundError: this user has no home folder.
    """
    if named := os.environ.get("AUTOPAR_CACHE"):
        return Path(named)
    try:
        return Path.home() / ".cache" / "autopar"
    except RuntimeError as error:
        raise FileNotFoundError(
            "this user has no home folder: set HOME, or AUTOPAR_CACHE to a folder"
        ) from error


def cache_file(kind: str, facts: Mapping[str, Any]) -> Path:
    """The file of a kind, such as "clusters", for what its content depends on.

    Raises:
        FileNotFoundError: as of `cache_directory`.
    """
    return cache_directory() / kind / f"{digest(facts)}.json"


def digest(facts: Mapping[str, Any]) -> str:
    """A short hash of a set of facts."""
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def read_cached(kind: str, facts: Mapping[str, Any], parse: Callable[[Any], T]) -> T | None:
    """The parsed content of `cache_file`, or None if there is no such file.

    A file that is damaged or cannot be read counts as absent, with a warning once a process.
    `parse` raises an ordinary error, such as KeyError or ValueError, for a damaged one.
    """
    try:
        path = cache_file(kind, facts)
        return parse(read_json(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        warn_once(
            MeasurementWarning,
            f"autopar cannot read {path}, a file of its cache ({error.strerror}), and measures "
            "again. Let this user read it, or set AUTOPAR_CACHE to another folder.",
        )
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


def write_cached(kind: str, facts: Mapping[str, Any], data: Any) -> None:
    """Writes JSON values to `cache_file` atomically; warns if that fails."""
    try:
        path = cache_file(kind, facts)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
        try:
            with draft.open("x") as file:
                json.dump(data, file)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        warn_once(MeasurementWarning, f"autopar could not keep its measurements: {error}")
