"""Runs passes: the one place that times, checks, records, dumps and writes reproducers."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from autopar.errors import PassError, StrategyError
from autopar.ir.graph import TrainingGraph, render
from autopar.passes.core.pass_base import Pass, describe, pass_name
from autopar.passes.core.verifier import check

FOLDER = "AUTOPAR_REPRODUCERS"
"""Environment variable of the folder for reproducers; the temporary folder by default."""

Observer = Callable[[str, TrainingGraph, float], None]


def run_passes(
    graph: TrainingGraph, passes: Iterable[Pass], observe: Observer | None = None
) -> TrainingGraph:
    """Applies passes in order; the graph is checked after each.

    Args:
        graph: a legal graph.
        passes: what to apply.
        observe: called after each pass with its name, the graph and the seconds it took.

    Raises:
        StrategyError: what was asked for cannot be done to this graph.
        PassError: a pass failed or made an illegal graph. The message names a file with the graph
            before it and the pipeline, to reproduce the failure with.
    """
    passes, given = tuple(passes), graph
    for index, item in enumerate(passes):
        begin = time.perf_counter()
        try:
            _check_required(item, graph)
            result = item(graph)
            line = describe(item) + (f": declined, {result.reason}" if result.reason else "")
            facts, told = graph.properties | item.ensures, (*graph.history, line)
            after = replace(result.graph, properties=facts, history=told)
            check(after)
        except StrategyError:
            raise  # what was asked for cannot be: no pass is at fault
        except Exception as error:
            path = _reproducer(_again(given, passes[:index]), passes, index)
            done = ", ".join(pass_name(p) for p in passes[:index]) or "none"
            raise PassError(
                f"pass {describe(item)} failed: {error}\n"
                f"passes before it: {done}; graph and pipeline are in {path}"
            ) from error
        graph = after
        if observe is not None:
            observe(pass_name(item), graph, time.perf_counter() - begin)
        graph = replace(graph, free=observe is None and graph.graph is not given.graph)
    return replace(graph, free=False)


def _check_required(item: Pass, graph: TrainingGraph) -> None:
    if missing := sorted(fact.name for fact in item.requires - graph.properties):
        raise PassError(f"the graph lacks {', '.join(missing)}: put a pass that ensures it before")


def _again(graph: TrainingGraph, passes: Iterable[Pass]) -> TrainingGraph:
    """The graph after passes that have run once: the next one may have changed theirs."""
    for item in passes:
        graph = item(replace(graph, free=False)).graph
    return graph


def _reproducer(graph: TrainingGraph, passes: tuple[Pass, ...], failed: int) -> Path:
    lines = [f"# {'->' if i == failed else '  '} {describe(p)}" for i, p in enumerate(passes)]
    folder = os.environ.get(FOLDER) or None
    with tempfile.NamedTemporaryFile(
        "w", prefix="autopar-pass-", suffix=".txt", dir=folder, delete=False
    ) as file:
        file.write("\n".join(lines) + "\n\n" + render(graph) + "\n")
    return Path(file.name)
