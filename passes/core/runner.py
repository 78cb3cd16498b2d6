"""Runs passes: the one place that times, checks and records them, and saves reproducers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from autopar.core.common.deadline import check_time
from autopar.core.ir.graph import TrainingGraph
from autopar.errors import AutoparError, BatchError, PassError, StrategyError
from autopar.formatting import first_line
from autopar.passes.core.pass_base import Pass, PassResult, describe, pass_name
from autopar.passes.core.pass_pipeline import PassPipeline
from autopar.passes.core.reproducer import Reproducer, command, save
from autopar.passes.core.verifier import check

Observer = Callable[[str, TrainingGraph, float], None]


def run_passes(
    graph: TrainingGraph, passes: Iterable[Pass], observe: Observer | None = None
) -> TrainingGraph:
    """Applies passes in order and checks the graph after each.

    Args:
        graph: a legal graph.
        passes: the passes.
        observe: called after each pass with its name, the graph and its time in seconds.

    Raises:
        StrategyError: the plan asks for something that this graph does not allow.
        PassError: a pass failed or made an illegal graph. The message holds the command that runs
            the pass again on a saved copy of the graph.
    """
    pipeline, captured = PassPipeline(passes), graph
    for index, item in enumerate(pipeline):
        check_time()
        begin = time.perf_counter()
        try:
            graph = apply_pass(item, graph)
        except (BatchError, StrategyError):
            raise  # the plan or the batch is at fault, no pass
        except Exception as error:
            before = ", ".join(pipeline.names[:index]) or "none"
            raise PassError(
                f"pass {describe(item)} failed: {_reason(error)}\n"
                f"passes before it: {before}\n{_reproducer(captured, pipeline, index, error)}"
            ) from error
        if observe is not None:
            observe(pass_name(item), graph, time.perf_counter() - begin)
        # The next pass may change a graph in place that neither the caller nor an observer holds.
        graph = replace(graph, disposable=observe is None and graph.graph is not captured.graph)
    return replace(graph, disposable=False)


def apply_pass(item: Pass, graph: TrainingGraph) -> TrainingGraph:
    """The graph after one pass, with its line in the history, checked.

    Raises:
        PassError: the graph lacks a property that the pass requires, or comes out illegal.
    """
    if missing := sorted(fact.name for fact in item.requires - graph.properties):
        raise PassError(f"the graph lacks {', '.join(missing)}: put a pass that ensures it before")
    result = item(graph)
    if not isinstance(result, PassResult):
        raise PassError(f"{pass_name(item)} returned {type(result).__name__}: return a PassResult")
    line = describe(item) + (f": declined, {result.reason}" if result.reason else "")
    properties, history = graph.properties | item.ensures, (*graph.history, line)
    after = replace(result.graph, properties=properties, history=history)
    check(after)
    return after


def _reason(error: Exception) -> str:
    """An error's text; the first line alone of others' errors, as torch.fx adds the whole graph."""
    return str(error) if isinstance(error, AutoparError) else first_line(error)


def _reproducer(
    captured: TrainingGraph, pipeline: PassPipeline, index: int, error: Exception
) -> str:
    """Saves a reproducer; the line of the message that names it."""
    graph, rest = captured, pipeline[index:]
    try:
        for item in pipeline[:index]:  # again, since the failed pass may have changed their graph
            graph = apply_pass(item, replace(graph, disposable=False))
        path = save(Reproducer(graph, rest, first_line(error)))
    except Exception as failure:
        return f"no reproducer was saved: {failure}"
    return f"to run it again: {command(path, rest)}"
