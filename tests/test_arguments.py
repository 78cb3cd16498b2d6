"""Nonsense arguments and documents are refused at once, by errors that name the place."""

import json
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import autopar
from autopar.cli.main import main
from autopar.core.common.checks import nbytes
from autopar.cost_model.cluster.cluster import Cluster
from autopar.formatting import duration, printable
from autopar.session.profiler.report import Profile
from tests.harness.nonsense.case import Case, outcome
from tests.harness.nonsense.cases import all_cases, likely_documents
from tests.harness.nonsense.examples import example_plan, example_profile

NET = torch.nn.Linear(2, 2)
ESCAPE = "\x1b]0;owned\x07\x1b[31m"


def test_nonsense_is_refused_by_name(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed of the documents: {seed}")
    counts, wrong, slow = Counter[str](), list[str](), list[tuple[float, Case]]()
    for case in all_cases(tmp_path, seed):
        found = outcome(case)
        counts[case.kind] += 1
        if found.what != "refused":
            wrong.append(f"{case.kind}, {case.said}: {found.what} {found.message}")
        if found.seconds > 1.0:  # a busy machine may stop any call for a while: tried again
            slow.append((outcome(case).seconds, case))
    print(f"{counts.total()} cases: {dict(counts)}")
    assert not wrong, f"{len(wrong)} with seed {seed}:\n" + "\n".join(wrong[:20])
    assert not [case.said for seconds, case in slow if seconds > 1.0]
    assert counts.total() >= 500


def test_examples_are_read_as_they_were() -> None:
    plan, cluster = example_plan(), Cluster.named("dgx-h100")
    assert autopar.Plan.from_dict(plan.to_dict()) == plan
    assert autopar.Plan.from_dict(json.loads(plan.to_json())).to_json() == plan.to_json()
    assert Cluster.from_dict(json.loads(json.dumps(cluster.to_dict()))) == cluster


def test_a_profile_is_read_as_it_was(tmp_path: Path) -> None:
    profile = example_profile()
    profile.save(tmp_path / "rank0.json")
    assert Profile.load(tmp_path / "rank0.json") == profile


def test_an_error_says_file_path_value_and_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    document = example_plan().to_dict()
    document["mesh"][0][1] = -1
    path.write_text(json.dumps(document))
    with pytest.raises(autopar.PlanError) as error:
        autopar.Plan.load(path)
    assert str(error.value) == (
        f"{path}: $.mesh[0][1] is -1: expected `int` >= 1. Make the plan again with autopar.plan."
    )


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("20G", 20 * 2**30),
        ("20GB", 20 * 10**9),
        ("20 GiB", 20 * 2**30),
        ("24gib", 24 * 2**30),
        ("1.5k", 1536),
        ("0.1KiB", 102),
        ("1TB", 10**12),
    ],
)
def test_bytes_are_read_in_every_unit(text: str, size: int) -> None:
    assert nbytes("memory", text) == size


def test_the_closest_name_is_suggested() -> None:
    with pytest.raises(autopar.StrategyError, match=r"recompute='ful': .* did you mean 'full'\?"):
        autopar.Strategy(recompute="ful")  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_plan_that_is_read_can_be_shown(tmp_path: Path) -> None:
    """Other values of the right types are refused, or make a plan that prints and draws."""
    plain = example_plan()
    shown = 0
    for said, document in likely_documents(plain.to_dict()):
        try:
            plan = autopar.Plan.from_dict(document)
        except autopar.PlanError:
            continue
        shown += 1
        try:
            assert all(isinstance(text, str) for text in (str(plan), plan.explain()))
            assert plan == plain or isinstance(plan.diff(plain), str)
            if shown % 4 == 0:  # pages take long
                plan.report(tmp_path / "plan.html")
            if plan.prediction is not None:
                plan.timeline(tmp_path / "plan.json")
        except Exception as error:
            raise AssertionError(said) from error
    assert shown >= 100


def escapes_in(text: str) -> list[str]:
    return re.findall(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text)


def test_escapes_in_names_are_not_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def evil(name: str) -> str:
        return f"{name}{ESCAPE}[/bold]\u202e"

    plain = example_plan()
    document = plain.to_dict()
    for name in ("name", "model", "cluster", "optimizer", "torch"):
        document[name] = evil(name)
    text = json.dumps(document).replace("head.weight", "head" + json.dumps(ESCAPE)[1:-1])
    path, other = tmp_path / f"plan{ESCAPE[:5]}.json", tmp_path / "other.json"
    path.write_text(text)
    plain.save(other)
    plan = autopar.Plan.load(path)
    assert plan.parameter_bytes[0][0] == "head" + ESCAPE
    for said in (str(plan), plan.explain(), plan.diff(plain)):
        assert r"\x1b[31m" in said
        assert not escapes_in(said)
    assert main(["show", str(path), "--explain"]) == 0
    assert main(["diff", str(path), str(other)]) == 1
    path.write_text("{")
    assert main(["show", str(path)]) == 2
    assert main(["show", ESCAPE]) == 2
    assert main([ESCAPE]) == 2
    cluster = replace(Cluster.named("dgx-h100"), name=evil("cluster"))
    cluster.save(tmp_path / "cluster.json")
    words = ["collectives", "--bytes", "1MB", "--ranks", "8", "--cluster"]
    assert main([*words, str(tmp_path / "cluster.json")]) == 0
    said = capsys.readouterr()
    assert r"\x1b[31m" in said.err
    assert not escapes_in(said.out + said.err)
    plan.report(tmp_path / "plan.html")
    assert "<bold" not in (tmp_path / "plan.html").read_text()


def test_printable_text_is_left_alone() -> None:
    assert printable("├ naïve\n\tλ 模") == "├ naïve\n\tλ 模"
    assert printable("\r\x9b\u202e\ud800") == r"\r\x9b\u202e\ud800"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (125.0, "125 s"),
        (12.34, "12.3 s"),
        (2.4567, "2.46 s"),
        (0.9999, "1.00 s"),
        (0.0999, "99.9 ms"),
        (2.5e-5, "25.0 µs"),
        (3e-9, "3 ns"),
        (0.0, "0 s"),
    ],
)
def test_durations_have_three_digits(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: autopar.Strategy(zer=3),
            r"Strategy\(\) has no argument 'zer'; did you mean 'zero",
        ),
        (lambda: autopar.compile(NET, strateg="ddp"), "'strateg'; did you mean 'strategy'"),
        (lambda: autopar.plan(NET, 2, memroy="1G"), "'memroy'; did you mean 'memory'"),
        (lambda: autopar.Strategy(blue=1), r"has no argument 'blue'$"),
    ],
)
def test_unknown_keywords_suggest_known_ones(call: Callable[[], object], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        call()
