"""A pipeline prints as a list that parses back, and runs without chosen passes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import pytest

from autopar.core.ir.mesh_levels import Levels
from autopar.core.ir.placement import OpStrategy, Partial, Replicate, Shard
from autopar.core.plan.compression import Compressions
from autopar.core.plan.overlap import Overlap
from autopar.core.plan.partition import Partition
from autopar.core.plan.pipeline import Pipeline
from autopar.core.plan.plan import Plan
from autopar.errors import PassError, StrategyError
from autopar.passes.communication.bucket_collectives import BucketCollectives
from autopar.passes.communication.schedule_overlap import ScheduleOverlap
from autopar.passes.core.pass_base import Pass, PassResult
from autopar.passes.core.pass_pipeline import PassPipeline
from autopar.passes.data_parallel.shard_parameters import ShardParameters
from autopar.passes.pipeline import build_model_pipeline, build_pass_pipeline, build_stage_pipeline
from tests.passes.golden import two_layers
from tests.passes.parity import AXIS

OVERLAPS = (Overlap(gather=(0.5, 1.25), reduce=(1e-9, 3.0)), Overlap(regather=(2.0,), stage=1))
STRATEGIES = (
    ("mm", OpStrategy((Shard(0), Shard(1, 3)), (Partial("max"),), "mean_loss")),
    ("primals_1", OpStrategy((), (Replicate(),))),
)


@cache
def plans() -> dict[str, Plan]:
    """One plan for every kind of pass and option."""
    it = two_layers()
    zero = [it.plan(stage, recompute) for stage in range(4) for recompute in ("none", "full")]
    compressed = Compressions(
        gather=("bf16",) * len(zero[6].buckets.gather),
        regather=("int8",) * len(zero[6].buckets.regather),
        reduce=("powersgd(rank=2)",) * len(zero[6].buckets.reduce),
        activations="bf16",
    )
    levels = (Levels(AXIS, 2, (("all_reduce", 0), ("powersgd", 1 << 20))),)
    tensor = replace(
        zero[6],
        world_size=4,
        mesh=((AXIS, 2), ("tp", 2)),
        partitions=(Partition("tp", 2),),
    )
    uses = (("blocks.0.weight", (0,)), ("blocks.1.weight", (1, 1)))
    return {
        **{f"zero{plan.zero_stages[0][1]} {plan.recompute[0][1]}": plan for plan in zero},
        "overlaps": replace(zero[6], overlaps=OVERLAPS, prefetch=2, in_flight=3),
        "compressed": replace(zero[6], compressions=compressed, levels=levels),
        "tensor parallel": tensor,
        "pipeline": replace(
            zero[6],
            world_size=4,
            mesh=(("pp", 2), (AXIS, 2)),
            pipeline=Pipeline(2, "1f1b", 2, uses=uses),
        ),
    }


def pipelines(plan: Plan) -> list[PassPipeline]:
    """Everything that is built for a plan, on its last rank."""
    rank, held = plan.world_size - 1, ("blocks.0.weight",)
    strategies = [STRATEGIES] * len(plan.partitions)
    found = [
        build_model_pipeline(plan, rank, op_strategies=strategies, micro_batches=count)
        for count in (1, 2)
    ]
    found += [
        build_stage_pipeline(plan, rank, "gloo", hold=hold, held=held, compiled=compiled)
        for hold, compiled in ((False, False), (True, True))
    ]
    if plan.pipeline is None:
        found.append(build_pass_pipeline(plan, rank, "nccl", op_strategies=strategies))
    return found


@pytest.mark.parametrize("name", plans())
def test_a_pipeline_parses_back(name: str) -> None:
    for pipeline in pipelines(plans()[name]):
        assert PassPipeline.parse(str(pipeline)) == pipeline


def test_a_pipeline_prints_as_a_numbered_list() -> None:
    pipeline = PassPipeline((ShardParameters(AXIS, 1, (("", 3),)), ScheduleOverlap()))
    assert str(pipeline) == (
        "1. shard_parameters(axis='dp', rank=1, stages=(('', 3),), dims=())\n"
        "2. schedule_overlap(prefetch=1, in_flight=0, overlaps=())"
    )


def test_numbers_and_defaults_may_be_left_out() -> None:
    text = "shard_parameters('dp', 1, (('', 3),))\n\n schedule_overlap(overlaps=(Overlap((1.5,)),))"
    assert PassPipeline.parse(text) == PassPipeline(
        (ShardParameters(AXIS, 1, (("", 3),)), ScheduleOverlap(overlaps=(Overlap((1.5,)),)))
    )


@dataclass(frozen=True)
class Calls(Pass):
    """A pass with an option that is no literal."""

    function: Callable[[], None]

    def __call__(self, graph: object) -> PassResult:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("shard_parameters", "write name\\(option=value, ...\\)"),
        ("shard_parameters(", "cannot read the pass 'shard_parameters\\('"),
        ("fold_constants()", "no pass is called fold_constants: import the module"),
        ("schedule_overlap(depth=1)", "unexpected keyword argument 'depth'"),
        (
            "schedule_overlap(prefetch=1 + 1)",
            "1 \\+ 1 is neither a literal nor a known constructor",
        ),
        ("schedule_overlap(overlaps=(Shard(0),))", "Shard is unknown; known are Overlap, schedule"),
        ("schedule_overlap(prefetch=__import__('os'))", "__import__ is unknown"),
        ("schedule_overlap(prefetch=torch.load)", "torch.load is neither a literal"),
        (str(PassPipeline((Calls(print),))), "cannot read the pass 'calls\\(function=<built-in"),
    ],
)
def test_text_that_is_no_pipeline(text: str, message: str) -> None:
    with pytest.raises(PassError, match=message):
        PassPipeline.parse(text)


def test_passes_can_be_disabled() -> None:
    plan = two_layers().plan(3)
    pipeline = build_pass_pipeline(plan, 0, "gloo", disable=("schedule_overlap",))
    assert "schedule_overlap" not in pipeline.names
    assert len(pipeline) == len(build_pass_pipeline(plan, 0, "gloo")) - 1
    with pytest.raises(StrategyError, match="shard_parameters cannot be disabled: it ensures PARA"):
        pipeline.without(["shard_parameters"])
    with pytest.raises(StrategyError, match="cannot disable overlap: no such pass; choose from "):
        pipeline.without(["overlap"])


def test_a_pipeline_splits_at_a_pass() -> None:
    pipeline = build_pass_pipeline(two_layers().plan(3), 0, "gloo")
    before, after = pipeline.split(ScheduleOverlap, BucketCollectives)
    assert before + after == pipeline
    assert after.names[0] == "bucket_collectives"
    assert pipeline[:2].split(ScheduleOverlap) == (pipeline[:2], PassPipeline())
