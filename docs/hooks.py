"""Hooks of the site (mkdocs.yml): pages that are written elsewhere, and links to the repository.

Documents link to files by relative paths, so that links work in a checkout and on a code host.
The site shows README.md as its home and the command line's help as a page, and keeps a copy of
every linked file of the repository under repository/.
"""

from __future__ import annotations

import argparse
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from autopar.cli.main import parser

ROOT = Path(__file__).resolve().parents[1]
HOME, COPIES = "README.md", "repository/"

_LINK = re.compile(r"(\]\()(?!https?:|#|mailto:)([^)#\s]+)")


def on_files(files: Files, config: Any) -> Files:
    """Adds the home page, generated references, and linked files of the repository."""
    _add(files, config, "index.md", (ROOT / HOME).read_text())
    _add(files, config, "reference/cli.md", command_line())
    _add(files, config, "decisions/index.md", decisions())
    queue = [HOME, *(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))]
    seen = set(queue)
    while queue:
        for target in _targets(queue.pop()) - seen:
            seen.add(target)
            _add(files, config, COPIES + target, (ROOT / target).read_text())
            queue += [target] if target.endswith(".md") else []
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turns links between files of the repository into links between pages of the site."""
    uri = page.file.src_uri
    document = HOME if uri == "index.md" else uri.removeprefix(COPIES)
    if not uri.startswith(COPIES) and document != HOME:
        document = f"docs/{uri}"
    folder = posixpath.dirname(uri)

    def link(match: re.Match[str]) -> str:
        target = _target(document, match[2])
        if not (ROOT / target).exists():  # for mkdocs to report
            return match[0]
        return match[1] + posixpath.relpath(_uri(target), folder or ".")

    return _LINK.sub(link, markdown)


def command_line() -> str:
    """The page of the command line: the help of every command."""
    top = parser()
    (commands,) = (a for a in top._actions if isinstance(a, argparse._SubParsersAction))
    names = {choice.dest: choice.help for choice in commands._choices_actions}
    rows = [f"| [`{name}`](#{name}) | {text} |" for name, text in names.items()]
    parts = ["# Command line", "", "| command | |", "|---|---|", *rows, ""]
    for name, command in commands.choices.items():
        parts += [f"## {name}", "", "```text", command.format_help().rstrip(), "```", ""]
    return "\n".join(parts)


def decisions() -> str:
    """The list of decisions."""
    pages = sorted((ROOT / "docs" / "decisions").glob("0*.md"))
    rows = [f"- [{page.read_text().splitlines()[0][2:]}]({page.name})" for page in pages]
    return "\n".join(["# Decisions", "", *rows, ""])


def _add(files: Files, config: Any, uri: str, text: str) -> None:
    files.append(File.generated(config, uri, content=text))


def _targets(document: str) -> set[str]:
    """Files outside of docs/ that a document links to."""
    text = (ROOT / document).read_text()
    found = {_target(document, match[2]) for match in _LINK.finditer(text)}
    return {path for path in found if not path.startswith("docs/") and (ROOT / path).is_file()}


def _target(document: str, link: str) -> str:
    """Path in the repository that a document's link leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(document), link))


def _uri(target: str) -> str:
    """Address in the site of a path in the repository."""
    if target == HOME:
        return "index.md"
    if (ROOT / target).is_dir():
        target += "/index.md"
    return target.removeprefix("docs/") if target.startswith("docs/") else COPIES + target
