"""Predictions of published runs from their configuration."""

from dataclasses import replace
from pathlib import Path

import pytest

import autopar
from autopar.core.plan.plan import Plan
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.group_shape import GroupShape
from autopar.planner.evaluate import pipeline_evaluator as pipelines
from benchmarks.published.__main__ import choose
from benchmarks.published.gpt import MasterAdamW, Sizes, make
from benchmarks.published.megatron import flops, pipelined
from benchmarks.published.planning import cluster_of, pinned
from benchmarks.published.run import Run
from benchmarks.published.tables import read
from examples.plan_llama import Size

SMALL = Sizes(256, 8, 8, 512, 128, tied=False)


def plan_of(sizes: Sizes, tp: int, pp: int, recompute: str, *, sequence: bool = False) -> Plan:
    model, inputs = make(sizes, 8 // tp)
    return autopar.plan(
        model,
        8,
        example_inputs=inputs,
        optimizer=MasterAdamW,
        strategy=pipelined(sizes, tp, pp, 1, 8 * pp // 8, recompute, sequence=sequence),
        cluster=Cluster.named("dgx-a100", 1),
        backend="ts",
    )


@pytest.mark.slow
def test_equal_stages_cost_the_same_as_when_evaluated_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deduplicated = plan_of(SMALL, 2, 4, "none")
    monkeypatch.setattr(pipelines, "equal_stages", lambda graphs, plan: tuple(range(len(graphs))))
    one_by_one = plan_of(SMALL, 2, 4, "none")
    assert without_programs(deduplicated) == without_programs(one_by_one)


def without_programs(plan: Plan) -> Plan:
    """The plan without the operators of its stages, which are kept once for equal stages."""
    report_data = replace(plan.prediction.report_data, programs=())
    return replace(plan, prediction=replace(plan.prediction, report_data=report_data))


@pytest.mark.slow
def test_fsdp_runs_gather_in_bfloat16_and_reduce_in_float32(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text(
        "model,seq_len,gpus,gpu,microbatch,grad_accum,tokens_per_s_per_gpu,sharding,act_ckpt\n"
        "1b,512,8,h100_80gb,2,3,52275,FULL_SHARD,True\n"
    )
    (run,) = read(table)
    run = replace(run, sizes=replace(run.sizes, hidden=128, heads=1, layers=3, vocabulary=64))
    plan = pinned(run)
    assert plan.zero_stages == (("", 3), *((f"blocks.{i}", 3) for i in range(3)))
    assert {level for _, level in plan.recompute} == {"everything"}
    parameters = sum(p.numel() for p in run.make()[0].parameters())
    pure = replace(run.strategy, reduce_precision="bf16")
    halved = dict(pinned(replace(run, strategy=pure)).sent_bytes)["dp"]
    # Three micro-batches gather for the forward and again for the backward, and reduce once.
    sent = dict(plan.sent_bytes)["dp"] / (3 * 7 / 8)
    assert sent == pytest.approx(parameters * (2 * 2 + 4), rel=0.02)
    assert halved / (3 * 7 / 8) == pytest.approx(parameters * (2 * 2 + 2), rel=0.02)


def shrunk(run: Run, layers: int, groups: int) -> Run:
    """The run with a small llama."""
    sizes = replace(run.sizes, hidden=512, layers=layers, vocabulary=256, length=2048)
    return replace(run, llama=Size(512, 1792, layers, 4, groups, 256), sizes=sizes)


@pytest.mark.slow
def test_torchtitan_recomputes_every_other_product(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text(
        "model,vocabulary,gpu,gpus,rows_per_gpu,length,recompute,backend,tokens_per_s_per_gpu,"
        "reserved_gib\n"
        "8b,128256,NVIDIA H100 96GB HBM2e,8,2,8192,op,eager,5762,82.4\n"
    )
    (run,) = read(table)
    run = shrunk(run, layers=3, groups=2)
    runs = (
        replace(run, half_products=False),
        run,
        replace(run, half_products=False, strategy=replace(run.strategy, recompute="everything")),
    )
    none, half, whole = (pinned(each).prediction.compute_s for each in runs)
    assert none < half < whole
    # The last product of a block is kept for nothing, and the loss has a second gradient.
    assert run.held_bytes == 2 * 8192 * (4 * 128256 + 2 * 4096 * 32)


@pytest.mark.slow
def test_fms_runs_shard_within_a_node_and_have_their_own_network(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text(
        "model,gpu,gpus,sharding,recompute,rows_per_gpu,node_gbit,tokens_per_s_per_gpu\n"
        "7b,NVIDIA A100-SXM4-80GB,16,HSDP,none,2,400,3760\n"
    )
    (run,) = read(table)
    slow, fast = cluster_of(run), cluster_of(replace(run, node_gbit=0.0))
    within, between = GroupShape(8, 8, 2), GroupShape(2, 1, 8)
    for shape, times in ((within, 1), (between, 4)):  # 8 x 200 Gbit/s on a DGX
        costs = [c.seconds("all_reduce", 2**30, shape, "float32").seconds for c in (slow, fast)]
        assert costs[0] / costs[1] == pytest.approx(times, rel=0.25)
    run = shrunk(run, layers=4, groups=4)
    plan = pinned(run)
    assert plan.hybrid
    assert plan.reduce_precision == "bfloat16"


def test_tables_have_the_configuration(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text(
        "# a comment\n"
        "model,params_b,hidden,layers,heads,vocab,seq,tp,pp,dp,mbs,layers_per_virtual_stage,"
        "ddp_impl,recompute,gpus,gbs,tflops_per_gpu\n"
        "76B,76.1,10240,60,80,51200,2048,8,4,32,2,5,local,full(uniform),1024,1792,140\n"
    )
    (run,) = read(table)
    assert (run.strategy.stages, run.strategy.micro_batches) == (12, 28)
    assert run.strategy.split_points is not None
    assert run.strategy.split_points[:2] == ("blocks.5", "blocks.10")
    h, s, layers = 10240, 2048, 60
    published = 96 * 1792 * s * layers * h**2 * (1 + s / (6 * h) + 51200 / (16 * layers * h))
    assert run.work == pytest.approx(published)
    assert flops(run.sizes, 1792, recomputed=False) < run.work
    table.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="no known table"):
        read(table)


@pytest.mark.slow
def test_own_plans_are_compared_with_the_recipe() -> None:
    strategy = pipelined(SMALL, 4, 2, 1, 2, "everything")
    run = Run("small", "dgx-a100", 8, SMALL, 8, strategy, 1.0, 1.0, "TFLOP/s")
    row = choose(run, 10.0)
    assert row["own_s"] <= row["recipe_s"]
    assert row["ratio"] == row["own_s"] / row["recipe_s"]


def test_trials_of_bigscience_count_the_ends_as_blocks_where_blocks_do_not_divide(
    tmp_path: Path,
) -> None:
    table = tmp_path / "table.csv"
    header = "date,hidden,layers,heads,tp,pp,dp,mbs,gbs,precision,seconds_per_step\n"
    rows = ("14336,70,112,4,12,8,2,2048,bf16,104.5", "14336,72,64,4,12,8,2,2048,fp16,110.48")
    table.write_text(header + "".join(f"02-27,{row}\n" for row in rows))
    ends, equal = read(table)
    for run, cuts in ((ends, ("blocks.5", "blocks.65")), (equal, ("blocks.6", "blocks.66"))):
        assert run.strategy.split_points is not None
        assert (run.strategy.split_points[0], run.strategy.split_points[-1]) == cuts
        assert (run.strategy.stages, run.strategy.micro_batches, run.gpus) == (12, 128, 384)
    # Their own count is 150.05 TFLOP/s, by a formula with all but the head.
    assert ends.published == pytest.approx(150.05, rel=0.04)
    network = cluster_of(ends).topology
    assert network is not None
    fabric = [link for *pair, link in network.edges(data=True) if "fabric" in pair]
    assert sum(link["bytes_per_s"] for link in fabric) == pytest.approx(50e9)  # of one machine


def test_ranks_that_await_their_messages_take_longer() -> None:
    strategy = pipelined(SMALL, 2, 4, 1, 8, "none")
    cluster = "dgx-a100"
    run = Run("small", cluster, 8, SMALL, 8, strategy, 1.0, 1.0, "TFLOP/s", scatters=True)
    alone, waits = (pinned(replace(run, awaits=awaits)).prediction for awaits in (False, True))
    assert alone is not None
    assert waits is not None
    assert waits.step_s > alone.step_s
    assert waits.compute_s == pytest.approx(alone.compute_s)


@pytest.mark.slow
def test_long_rows_go_round_in_float8(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text(
        "model,vocabulary,gpu,gpus,cp,length,reserved_gib,tokens_per_s_per_gpu\n"
        "8b,128256,NVIDIA H100 96GB HBM2e,8,4,131072,84.0,1071\n"
    )
    (run,) = read(table)
    run = shrunk(run, layers=3, groups=2)
    float8, bfloat16 = (pinned(replace(run, float8=narrow)) for narrow in (True, False))
    assert dict(float8.mesh)["cp"] == 4
    assert float8.prediction is not None
    assert bfloat16.prediction is not None
    assert dict(float8.sent_bytes)["cp"] > 0
    found = [plan.prediction.work.flops for plan in (float8, bfloat16)]
    assert found[0] == pytest.approx(found[1], rel=1e-3)
