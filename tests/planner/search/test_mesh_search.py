"""Which meshes are looked at, and which is chosen, from answers that a person can check."""

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest

from autopar.core.common.deadline import TimeIsOver
from autopar.core.plan.plan import Plan
from autopar.core.plan.prediction import Prediction
from autopar.core.plan.strategy import Strategy
from autopar.errors import BatchError, CaptureError, OutOfMemoryError, PlanError
from autopar.planner.problem import PlanningProblem, SearchContext
from autopar.planner.search.mesh_estimate import MeshEstimate
from autopar.planner.search.mesh_search import (
    UNDIVIDED,
    EstimateMesh,
    PlanMesh,
    SearchProgress,
    fastest_mesh,
)
from autopar.planner.search.meshes import MostRanks, meshes, with_micro_batches
from tests.harness.models import MODELS
from tests.planner.problems import problem_of

GPT = MODELS["gpt"]
AUTO = Strategy(search=("pp", "tp"))
Mesh = tuple[int, int, int | None]


def mesh(strategy: Strategy) -> Mesh:
    return strategy.pp_size, strategy.model_parallel_size, strategy.micro_batches


def all_meshes(
    strategy: Strategy, world_size: int, near: int, blocks: int = 2, *, ep: int = 1, cp: int = 1
) -> list[Strategy]:
    """Meshes on nodes of `near` ranks, where ep and cp may be wider."""
    most = MostRanks(blocks, near, max(near, ep), max(near, cp))
    return list(meshes(strategy, world_size, near, most))


def test_every_mesh_the_fewest_parts_first() -> None:
    found = [mesh(own)[:2] for own in all_meshes(AUTO, 4, 4, blocks=3)]
    assert found == [(1, 1), (1, 2), (2, 1), (1, 4), (2, 2)]
    far = [mesh(own)[:2] for own in all_meshes(AUTO, 16, 2)]
    assert far == [(1, 1), (1, 2), (2, 1), (2, 2)]
    fixed = [mesh(own)[:2] for own in all_meshes(replace(AUTO, tp=2), 8, 8, blocks=8)]
    assert fixed == [(1, 2), (2, 2), (4, 2)]
    assert all_meshes(Strategy(), 4, 4, blocks=3) == [Strategy()]


def test_experts_and_long_rows_are_divided_beyond_a_node() -> None:
    """ep up to the experts, cp by the length of rows; tp stays on a node."""
    strategy = Strategy(search=("tp", "cp", "ep"))
    found = {tuple(own.axes.items()) for own in all_meshes(strategy, 32, 2, ep=16, cp=8)}
    assert max(own.get("ep", 1) for own in map(dict, found)) == 16
    assert max(own.get("cp", 1) for own in map(dict, found)) == 8
    assert max(own.get("tp", 1) for own in map(dict, found)) == 2
    assert (("cp", 2), ("ep", 16)) in found
    assert (("cp", 4), ("ep", 4)) not in found  # both beyond a node
    both = all_meshes(replace(strategy, cp=4), 32, 2, ep=16)
    assert {own.ep for own in both} == {1, 2, 4, 8}


def test_zero_shards_over_few_ranks_of_a_large_world() -> None:
    """At most 1,024 unless the strategy fixes them; smaller worlds shard over all ranks."""
    strategy = Strategy(search=("tp", "dp_shard"))
    found = all_meshes(strategy, 131072, 8)
    assert {own.tp: own.dp_shard for own in found if own.dp_shard not in (2, 4, 8)} == {
        1: 1024, 2: 1024, 4: 1024, 8: 1024,
    }  # fmt: skip
    assert {own.dp_shard for own in all_meshes(strategy, 3000, 8)} == {1000, 750, 8, 4, 2, None}
    assert all_meshes(strategy, 1024, 8)[0].dp_shard is None
    for fixed in (replace(strategy, dp_shard=2048), replace(strategy, zero=0)):
        assert all_meshes(fixed, 131072, 8)[0].dp_shard == fixed.dp_shard
    assert all_meshes(Strategy(search=("tp",)), 131072, 8)[0].dp_shard is None


def test_what_is_worth_dividing_beyond_a_node() -> None:
    moe = problem_of(MODELS["moe"].make(), Strategy(), world_size=16, row_length=32 * 4096)
    assert MostRanks.of(moe, 2) == MostRanks(pp=3, tp=2, ep=4, cp=32)
    plain = problem_of(MODELS["conv"].make(), Strategy(), world_size=16, row_length=4096)
    assert MostRanks.of(plain, 8) == MostRanks(pp=len(plain.blocks), tp=8, ep=8, cp=8)
    small = problem_of(MODELS["gpt"].make(), Strategy(), world_size=8)
    assert MostRanks.of(small, 2).tp == 8


def test_micro_batches_divide_the_rows_of_a_rank() -> None:
    def counts(rows: int, **axes: int) -> list[int | None]:
        return [each.micro_batches for each in with_micro_batches(Strategy(**axes), rows=rows)]

    assert counts(0) == [1, 2, 4, 8]
    assert counts(64) == [1, 2, 4, 8]
    assert counts(12) == [1, 2, 4, 6]
    assert counts(7) == [1, 7]
    assert counts(20, pp=4) == [1, 2, 4, 10, 20]
    assert counts(12, micro_batches=5) == [5]


def test_ranks_of_tp_are_next_to_each_other() -> None:
    assert Strategy(tp=2, ep=4).mesh(16) == (("dp", 2), ("ep", 4), ("tp", 2))


def test_shards_over_the_neighbours_that_are_left_of_a_node() -> None:
    strategy = Strategy(search=("tp", "dp_shard"))
    found = [(own.model_parallel_size, own.dp_shard) for own in all_meshes(strategy, 16, 4)]
    assert found == [(1, None), (1, 4), (2, None), (2, 2), (4, None)]
    alone = [own.dp_shard for own in all_meshes(strategy, 4, 4)]
    assert alone == [None] * 3  # one node
    assert not any(own.dp_shard for own in all_meshes(replace(strategy, zero=0), 16, 4))


def problem(strategy: Strategy = AUTO, memory: int | None = None) -> PlanningProblem:
    return problem_of(GPT.make(), strategy, memory=memory)


def predicted(step_s: float, exposed_s: float, recompute: str = "none") -> Plan:
    cost = Prediction(
        step_s=step_s,
        update_s=0.0,
        compute_s=step_s - exposed_s,
        communication_s=exposed_s,
        exposed_s=exposed_s,
        peak_bytes=1,
        memory={},
    )
    levels = (("", recompute),)
    return replace(problem().base(), recompute=levels, memory_cap=1, prediction=cost)  # type: ignore[arg-type]


Answers = Mapping[Mesh, Plan | Exception]


def looking(answers: Answers, seen: list[Mesh]) -> PlanMesh:
    def look(own: PlanningProblem, context: SearchContext) -> Plan:
        assert not own.strategy.search
        seen.append(mesh(own.strategy))
        answer = answers[seen[-1]]
        if isinstance(answer, Exception):
            raise answer
        return replace(answer, name=str(seen[-1]))

    return look


def expecting(seconds: Mapping[Mesh, float]) -> EstimateMesh:
    """Outlines that are right to the half; others take 10 s."""

    def sketch(own: PlanningProblem) -> MeshEstimate:
        step_s = seconds.get(mesh(own.strategy), 10.0)
        return MeshEstimate(own.strategy, step_s, step_s / 2, 0.0)

    return sketch


FAR = expecting({})


def test_the_fastest_is_chosen_and_the_others_are_kept() -> None:
    """In the order in which they are expected, as long as one may be faster."""
    answers: Answers = {
        (1, 1, None): predicted(2.0, 1.0),
        (2, 1, 4): predicted(1.2, 0.2),
        (1, 2, None): BatchError("odd rows"),
        (2, 1, 8): predicted(1.3, 0.3),
    }
    expected = {(2, 1, 4): 1.1, (1, 2, 1): 1.2, (2, 1, 8): 1.3, (2, 1, 2): 1.4, (2, 2, 2): 2.3}
    incumbents_s: list[float] = []
    look = looking(answers, seen := [])

    def noting(own: PlanningProblem, context: SearchContext) -> Plan:
        incumbents_s.append(context.incumbent_s)
        return look(own, context)

    plan = fastest_mesh(problem(), noting, expecting(expected), 4)
    assert seen == list(answers)
    assert incumbents_s == [math.inf, 2.0, 1.2, 1.2]
    assert plan.name == "(2, 1, 4)"
    assert [other.name for other in plan.runners_up] == ["(2, 1, 8)", "(1, 1, None)"]
    assert plan.runners_up[0].why == "100 ms slower: +100 ms to wait for messages"
    assert plan.notes[-2] == "not possible: tp=2: odd rows"
    assert plan.notes[-1].startswith(
        "not looked at: pp=2 in 2 micro-batches, pp=2 x tp=2 in 2 micro"
    )
    assert plan.notes[-1].endswith("expected to take 1.40 s or more, and certainly 700 ms")


@pytest.mark.parametrize("expected_s", [1.2, math.inf])
def test_tp_that_divides_nothing_is_left_out(expected_s: float) -> None:
    """If a plan on it is expected to fit, data parallelism has it too."""
    answers: Answers = {(1, 1, None): predicted(2.0, 1.0), (2, 1, 4): predicted(1.5, 0.5)}

    def sketch(own: PlanningProblem) -> MeshEstimate:
        found = expecting({(1, 2, 1): expected_s, (2, 1, 4): 1.1})(own)
        return replace(found, divides=own.strategy.tp != 2)

    plan = fastest_mesh(problem(), looking(answers, seen := []), sketch, 4)
    assert seen == list(answers)
    told = [note for note in plan.notes if note.endswith(UNDIVIDED)]
    assert any("possible: tp=2" in note for note in told) == math.isfinite(expected_s)
    fixed = replace(AUTO, tp=2)
    answers = {(1, 2, None): predicted(2.0, 1.0), (2, 2, 2): predicted(1.5, 0.5)}
    assert fastest_mesh(problem(fixed), looking(answers, []), expecting({(2, 2, 2): 1.1}), 4)


def test_the_best_of_every_mesh_comes_first_where_several_are_tried() -> None:
    answers: Answers = {
        (1, 1, None): predicted(2.0, 1.0),
        (2, 1, 4): predicted(1.6, 0.2),
        (1, 2, None): predicted(1.7, 0.2),
        (2, 1, 8): predicted(1.5, 0.2),
    }
    expected = {(2, 1, 4): 1.1, (2, 1, 8): 1.3, (1, 2, 1): 1.4}
    context = SearchContext(on_candidate=lambda plan: None)
    plan = fastest_mesh(problem(), looking(answers, seen := []), expecting(expected), 4, context)
    assert seen == [(1, 1, None), (2, 1, 4), (1, 2, None), (2, 1, 8)]
    assert plan.name == "(2, 1, 8)"


def test_what_cannot_be_faster_is_not_looked_at() -> None:
    """An outline promises half of 10 s at best."""
    plan = fastest_mesh(
        problem(), looking({(1, 1, None): predicted(2.0, 0.5)}, []), FAR, ranks_per_node=4
    )
    assert plan.notes[-1].endswith("certainly 5.00 s")


def test_what_computes_all_the_time_cannot_be_beaten() -> None:
    answers: Answers = {(1, 1, None): predicted(2.0, 0.01)}
    plan = fastest_mesh(problem(), looking(answers, []), FAR, 4)
    assert "not looked at: tp=2, pp=2, tp=4, pp=2 x tp=2; 0% of the step" in plan.notes[-1]
    assert plan == fastest_mesh(problem(), looking(answers, []), FAR, 4)


def test_time_runs_out() -> None:
    answers: Answers = {(1, 1, None): predicted(2.0, 0.5)}
    expected = expecting({(2, 1, 4): 1.1})
    plan = fastest_mesh(problem(), looking(answers, []), expected, 4, SearchContext(lambda: False))
    assert plan.notes[-1].endswith("; time ran out")
    assert plan.search is not None
    assert (plan.search.looked, plan.search.complete, plan.search.bound_s) == (1, False, 0.0)


def test_micro_batches_while_memory_presses() -> None:
    """Without stages they are rows that wait: less in memory, no less to compute."""
    answers: Answers = {
        (1, 1, None): OutOfMemoryError("", 7),
        (1, 1, 2): predicted(2.0, 0.5, "full"),
        (1, 1, 4): predicted(1.5, 0.01),
    }
    expected = expecting({(1, 1, 2): 1.0, (1, 1, 4): 1.1})
    plan = fastest_mesh(
        problem(memory=10**9), looking(answers, seen := []), expected, ranks_per_node=4
    )
    assert seen == list(answers)
    assert plan.name == "(1, 1, 4)"


def test_states_that_exceed_the_cap_are_not_looked_at() -> None:
    """Whole states of 4 x 112,040 bytes fit in 120 kB only over four ranks."""
    given = problem(replace(AUTO, zero=0), memory=120_000)
    answers: Answers = {(1, 4, None): predicted(2.0, 0.0)}
    expected = expecting({(1, 4, 1): 1.0})
    assert fastest_mesh(given, looking(answers, []), expected, 4).name == "(1, 4, None)"
    with pytest.raises(OutOfMemoryError, match="on tp=4 parameters, gradients and states alone"):
        fastest_mesh(replace(given, memory=50_000), looking({}, []), expected, 4)


def test_in_limited_time_the_first_that_fits_comes_before_estimates() -> None:
    """Meshes without stages, which few blocks price, the widest models first."""
    answers: Answers = {
        (1, 1, 2): OutOfMemoryError("", 7),
        (1, 4, 2): OutOfMemoryError("", 5),
        (1, 2, 2): predicted(2.0, 0.5),
    }
    given, seen = problem(replace(AUTO, micro_batches=2), memory=10**9), list[Mesh]()
    context = SearchContext(lambda: False, timed=True, estimating=lambda: len(seen) < 3)
    plan = fastest_mesh(given, looking(answers, seen), FAR, 4, context)
    assert seen == list(answers)
    assert plan.search is not None
    assert not plan.search.complete


@pytest.mark.parametrize(("whole_s", "then"), [(1.0, (1, 1, 2)), (5.0, (1, 1, 64))])
def test_whole_batches_follow_the_fewest_rows_in_larger_worlds(whole_s: float, then: Mesh) -> None:
    """Parts next to the faster of the two come next."""
    answers: Answers = {
        (1, 1, 256): BatchError("too few rows"),
        (1, 1, 128): predicted(3.0, 0.5, "full"),
        (1, 1, None): predicted(whole_s, 0.5, "full"),
        then: predicted(4.0, 0.5, "full"),
    }
    own = problem_of(GPT.make(), AUTO, world_size=16, memory=10**9)
    context, seen = SearchContext(lambda: False, timed=True, estimating=lambda: False), list[Mesh]()
    plan = fastest_mesh(own, looking(answers, seen), FAR, 8, context)
    assert seen[:4] == list(answers)
    assert plan.prediction is not None
    assert plan.prediction.step_s == min(whole_s, 3.0)


def test_the_first_candidate_that_fits_is_told_at_once() -> None:
    """Not the one that needs too much, and none after the first."""
    told: list[tuple[float, bool]] = []
    done: list[bool] = []

    def look(own: PlanningProblem, context: SearchContext) -> Plan:
        large, first, better = predicted(1.0, 0.5), predicted(3.0, 0.5), predicted(2.0, 0.5)
        assert large.prediction is not None
        too_large = replace(large.prediction, peak_bytes=10**12)
        for plan in (replace(large, prediction=too_large), first, better):
            context.note(plan)
        done.append(True)
        return better

    def progress(search: SearchProgress) -> None:
        told.append((search.best_s, bool(done)))

    context = SearchContext(timed=True, estimating=lambda: False)
    fastest_mesh(problem(memory=10**9), look, FAR, 4, context, progress)
    assert next(each for each in told if each[0]) == (3.0, False)
    assert told.count((3.0, False)) == 1
    assert (2.0, False) not in told


def test_time_that_ends_before_anything_fits_proves_nothing() -> None:
    def late(own: PlanningProblem, context: SearchContext) -> Plan:
        if mesh(own.strategy) == (1, 1, None):
            raise OutOfMemoryError("", 7 * 2**30)
        raise TimeIsOver

    context = SearchContext(lambda: False, timed=True)
    with pytest.raises(PlanError, match=r"lacks at least 7.0 GiB. Not looked at: .*pp=2"):
        fastest_mesh(problem(memory=10**9), late, FAR, 4, context)


def test_estimates_end_with_the_first_that_lacks_time() -> None:
    asked: list[Mesh] = []

    def lacking(own: PlanningProblem, context: SearchContext) -> Plan:
        raise OutOfMemoryError("", 7 * 2**30)

    def late(own: PlanningProblem) -> MeshEstimate:
        asked.append(mesh(own.strategy))
        raise TimeIsOver

    context = SearchContext(lambda: False, timed=True)
    with pytest.raises(PlanError, match="Not looked at"):
        fastest_mesh(problem(memory=10**9), lacking, late, 4, context)
    assert len(asked) == 1


@pytest.mark.parametrize("others", [True, False])
def test_a_plan_that_does_not_fit_whole_is_told_or_replaced(others: bool) -> None:
    answers: Answers = {(1, 1, None): predicted(2.0, 1.0), (1, 2, None): predicted(1.2, 0.2)}
    expected = {(1, 2, None): 1.2, (1, 2, 1): 1.2} if others else {}

    def refine(plan: Plan) -> Plan | None:
        fastest = "(1, 2, None)" if others else "(1, 1, None)"
        if plan.name != fastest or plan.notes or plan.prediction is None:
            return None
        return replace(plan, prediction=replace(plan.prediction, peak_bytes=10**9), notes=("told",))

    tight = problem(memory=10**8)
    found = fastest_mesh(tight, looking(answers, []), expecting(expected), 4, refine=refine)
    assert found.name == "(1, 1, None)"
    assert ("told" in found.notes) == (not others)


def test_what_cannot_be_captured_at_all_is_said() -> None:
    with pytest.raises(CaptureError):
        fastest_mesh(problem(), looking({(1, 1, None): CaptureError("if x > 0")}, []), FAR, 4)
