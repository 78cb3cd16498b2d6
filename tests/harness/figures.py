"""Figures that documents quote, held against the kept results that they come from.

A comment before a table or paragraph names the file and what is read from it:

    <!-- from benchmarks/results/NAME.json
    rows[model=gpt,contender=autopar-ddp].ratio
    = cases[model=$1,cap=null].regret; median cases[model=$1].error *100
    deep
    wide
    -->

Each line is a row of the table: values of its queries, in order, are the cells that are numbers.
Lines behind one with "=" are its words for $1, $2 and so on, up to "=" alone. A line that begins
with "-" skips a row that has no result. Above a paragraph, all values stand in it in this order,
among other numbers.

A query is a path with selectors; before it stand functions such as `mean abs`, behind it a factor.
`FILE:` in front of the path reads another file, named from the folder of the first.
`python -m tests.harness.figures` prints what differs.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any

from tests.harness.prose import ROOT, documents

_COMMENT = re.compile(r"^<!-- from (\S+\.json)\n(.*?)^-->\n\n(.*?)(?=\n\n|\Z)", re.M | re.S)
_STEP = re.compile(r"\[([^\]]*)\]|\.?([^.\[\]]+)")
_TERM = re.compile(r"(?:\[[^\]]*\]|\S)+")
_CELL = re.compile(r"(?:[\d.,]+(?:e-?\d+)?(?: (?:%|s|GiB|times))?(?: [/,] )?)+")
_NUMBER = re.compile(r"(?<![\w.-])\d[\d,]*(?:\.\d+)?(?:e-?\d+)?(?!\w)")
_FUNCTIONS: dict[str, Callable[[list[float]], list[float]]] = {
    "abs": lambda values: [abs(value) for value in values],
    "inverse": lambda values: [1 / value for value in values],
    "mean": lambda values: [mean(values)],
    "median": lambda values: [median(values)],
    "max": lambda values: [max(values)],
    "min": lambda values: [min(values)],
    "sum": lambda values: [sum(values)],
    "count": lambda values: [len(values)],
}


def differences(document: Path) -> list[str]:
    """Every figure of a document that its result does not have, in words."""
    return [line for comment in _COMMENT.finditer(document.read_text()) for line in _check(comment)]


def marks(document: Path) -> int:
    """Number of tables and paragraphs of a document that name their results."""
    return len(_COMMENT.findall(document.read_text()))


def _check(comment: re.Match[str]) -> Iterator[str]:
    file, queries, block = comment.groups()
    wanted = [_values(line, ROOT / file) for line in _lines(queries)]
    if not block.startswith("|"):
        left = iter(_NUMBER.findall(block))
        for value in (value for values in wanted for value in values or []):
            if not any(_equal(token, value) for token in left):
                yield f"{file}: {value:.6g} is not in {block[:60]!r} in this order"
        return
    rows = block.splitlines()[2:]
    if len(rows) != len(wanted):
        yield f"{file}: {len(wanted)} lines for {len(rows)} rows below {block[:60]!r}"
    for row, values in zip(rows, wanted, strict=False):
        tokens = [token for cell in _cells(row) for token in _NUMBER.findall(cell)]
        agree = values is None or len(tokens) == len(values)
        if not agree or not all(map(_equal, tokens, values or [])):
            yield f"{file}: {[float(f'{v:.4g}') for v in values or []]} are not those of {row}"


def _cells(row: str) -> list[str]:
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    return [cell for cell in cells if _CELL.fullmatch(cell)]


def _equal(token: str, value: float) -> bool:
    mantissa, _, exponent = token.replace(",", "").partition("e")
    unit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    return abs(float(token.replace(",", "")) - value) <= unit * 0.5000001


def _lines(text: str) -> Iterator[str]:
    template = ""
    for line in text.strip().splitlines():
        if line.startswith("="):
            template = line.removeprefix("=").strip()
        elif template and not line.startswith("-"):
            filled = template
            for number, word in enumerate(line.split(), 1):
                filled = filled.replace(f"${number}", word)
            yield filled
        else:
            yield line


def _values(line: str, file: Path) -> list[float] | None:
    if line.startswith("-"):
        return None
    return [value for query in line.split(";") for value in _query(query, file)]


def _query(query: str, file: Path) -> list[float]:
    *functions, path = (word for word in _TERM.findall(query) if not word.startswith("*"))
    factor = next((float(word[1:]) for word in _TERM.findall(query) if word.startswith("*")), 1.0)
    other, colon, inner = path.rpartition(".json:")
    document = json.loads((file.parent / f"{other}.json" if colon else file).read_text())
    found = [value for value in _select(document, inner) if isinstance(value, int | float)]
    if not found:
        raise ValueError(f"{file.name} has nothing at {path}")
    for name in reversed(functions):
        found = _FUNCTIONS[name](found)
    return [value * factor for value in found]


def _select(document: Any, path: str) -> list[Any]:
    items = [document]
    for match in _STEP.finditer(path):
        items = [part for item in items for part in (item if isinstance(item, list) else [item])]
        if match[2]:
            items = [item[match[2]] for item in items if match[2] in item]
        else:
            items = [item for item in items if all(_holds(item, c) for c in match[1].split(","))]
    return items


def _holds(item: dict[str, Any], condition: str) -> bool:
    key, differs, value = re.split(r"(!?=)", condition, maxsplit=1)
    text = item.get(key)
    return (("null" if text is None else str(text)) == value) == (differs == "=")


def main() -> int:
    """Prints the figures that differ; the status is 1 if there are any."""
    found = [f"{path.name}: {line}" for path in documents() for line in differences(path)]
    print("\n".join(found) or f"{sum(map(marks, documents()))} tables and paragraphs agree")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
