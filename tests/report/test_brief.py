"""The short answer: a line for each fact, few notes, colour on terminals only."""

from dataclasses import replace

from autopar.core.plan.prediction import Prediction
from autopar.core.plan.search_outcome import SearchOutcome
from autopar.core.plan.strategy import Strategy
from autopar.report.brief import WIDTH, brief, coloured
from tests.harness.models import MODELS
from tests.planner.problems import problem_of

NOTES = ("short", *(f"note {number}: {'word ' * 30}" for number in range(4)))


def test_notes_are_whole_and_counted_and_lines_are_coloured() -> None:
    base = problem_of(MODELS["gpt"].make(), Strategy()).base()
    cost = Prediction(0.1, 0.0, 0.1, 0.0, 0.0, peak_bytes=1)
    search = SearchOutcome(1, 2, 0.09, "zero3", 0.12, complete=False)
    text = brief(replace(base, prediction=cost, search=search, notes=NOTES))
    lines = text.splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert sum(line.startswith("  note") for line in lines) == 3
    assert text.count("word") == 60
    assert lines[-1].split()[:3] == ["2", "more", "notes:"]
    assert (
        "  searched  time ran out: 1 mesh, 2 left out; a better plan saves at most 10.0%" in lines
    )
    shown = coloured(text)
    assert shown.plain == text
    names = [shown.plain[s.start : s.end].strip() for s in shown.spans if s.style == "cyan"]
    assert names == ["trains", "step", "memory", "bound by", "verdict", "searched", *["note"] * 3]
    assert shown.spans[0].style == "bold"
