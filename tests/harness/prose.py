"""Readability of the documents: words a sentence, and sentences over 25 words.

`python -m tests.harness.prose [FOLDER]` prints the figures of a checkout; `--long` lists long ones.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parents[2]
MOST_WORDS = 25

_FENCE = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_NOT_PROSE = re.compile(r"^(#|\||!\[|<!--| {4,}[^-*\d ])|^:::")
_ITEM = re.compile(r"^ *([-*]|\d+\.) ")
_END = re.compile(r"(?<=[.!?])[)\"*]*\s+(?=[A-Z`\[*(\"]|autopar)")
_WORD = re.compile(r"[^\W_]")


def documents(root: Path = ROOT) -> list[Path]:
    """README, CONTRIBUTING and the pages of docs/."""
    return [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").rglob("*.md"))]


def sentences(text: str) -> Iterator[str]:
    """Sentences of a document's paragraphs and list items, without code blocks and tables."""
    paragraph: list[str] = []
    for line in [*_COMMENT.sub("", _FENCE.sub("\n", text)).splitlines(), ""]:
        ends = not line.strip() or _NOT_PROSE.match(line) or _ITEM.match(line)
        if ends and paragraph:
            yield from _END.split(" ".join(paragraph))
            paragraph = []
        if line.strip() and not _NOT_PROSE.match(line):
            paragraph.append(_ITEM.sub("", line).strip())


def words(sentence: str) -> int:
    """Number of words; code in backticks and the text of a link count as they are read."""
    read = re.sub(r"\]\([^)]*\)", "]", sentence)
    read = re.sub(r"`[^`]*`", "code", read)
    return sum(1 for word in read.split() if _WORD.search(word))


def main(arguments: list[str]) -> int:
    """Prints figures, or the long sentences."""
    folders = [Path(word) for word in arguments if word != "--long"]
    root = folders[0] if folders else ROOT
    lengths = list[int]()
    for path in documents(root):
        for sentence in sentences(path.read_text()):
            lengths.append(words(sentence))
            if "--long" in arguments and lengths[-1] > MOST_WORDS:
                print(f"{path.relative_to(root)}: {lengths[-1]}: {sentence}")
    over = sum(length > MOST_WORDS for length in lengths)
    print(
        f"{len(lengths)} sentences, {mean(lengths):.1f} words each, "
        f"{over} over {MOST_WORDS} words ({over / len(lengths):.1%})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
