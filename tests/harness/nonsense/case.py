"""`Case`: a call that must be refused with an error that names its cause; `outcome` makes it."""

import math
import re
import time
from collections.abc import Callable
from typing import NamedTuple

import autopar

NAN, INF = math.nan, math.inf


class Case(NamedTuple):
    """A call that must be refused.

    Attributes:
        kind: what is given nonsense.
        names: the error must contain one of these words.
        said: the nonsense, in words.
        call: does it.
    """

    kind: str
    names: tuple[str, ...]
    said: str
    call: Callable[[], object]


class Outcome(NamedTuple):
    """Result of a case: "refused", "unnamed", "raw" or "accepted", and in how many seconds."""

    what: str
    seconds: float
    message: str


def outcome(case: Case) -> Outcome:
    """Runs a case."""
    begin = time.perf_counter()
    try:
        case.call()
    except (autopar.AutoparError, TypeError, ValueError) as error:
        words = set(re.findall(r"[\w.-]+|\$", str(error).replace("$.", "$ ").replace(".", " . ")))
        words |= set(re.findall(r"[\w.-]+", str(error)))
        what = "refused" if words & set(case.names) else "unnamed"
        return Outcome(what, time.perf_counter() - begin, str(error))
    except Exception as error:
        return Outcome("raw", time.perf_counter() - begin, repr(error))
    return Outcome("accepted", time.perf_counter() - begin, "")
