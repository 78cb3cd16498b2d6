"""Documents with every field set: a plan and a profile."""

from autopar.core.exposure import Exposure
from autopar.core.ir.mesh_levels import Levels
from autopar.core.ir.placement import OpStrategy, Replicate, Shard
from autopar.core.plan.buckets import Buckets
from autopar.core.plan.compression import Compressions
from autopar.core.plan.overlap import Overlap
from autopar.core.plan.partition import Partition
from autopar.core.plan.pipeline import Pipeline
from autopar.core.plan.plan import Plan
from autopar.core.plan.prediction import Prediction, RunnerUp, StagePrediction, Work
from autopar.core.plan.report_data import CollectiveCall, ReportData, StageProgram, Traffic
from autopar.cost_model.simulator.streams import Event
from autopar.session.profiler.report import Again, Message, Profile, Side


def example_plan() -> Plan:
    """A plan that says something in every field."""
    parameters = (("head.weight", 4096), ("blocks.0.weight", 1024))
    traffic = Traffic(
        "all_reduce",
        "tp",
        "2 ranks",
        "float32",
        "measured",
        ((8, 1e-4),),
        ((8, 1e-4, 0.1),),
        ((8, 1, 1e-4),),
    )
    call = CollectiveCall("a", "b", "blocks.0", 8, "float32[2]")
    events = (("a", "compute", 0.0, 0.1, "compute"),)
    report_data = ReportData(
        8,
        (("blocks.0", "forward", 0.0, 0.1),),
        (0.0, 0.1),
        (("parameters", (5, 6)),),
        (traffic,),
        (call,),
        (StageProgram((0, 1), (("F", 0.1, events),), (call,), "float32[2]", "float32[2]"),),
    )
    exposure = Exposure("a", "blocks.0", "all_reduce", "tp", 8, 0.1, 0.01, 0.01, 0.01)
    stage = StagePrediction(8, 0.1, 0.2, 8, 8, 8, 1)
    prediction = Prediction(
        step_s=0.3,
        update_s=0.1,
        compute_s=0.1,
        communication_s=0.1,
        exposed_s=0.05,
        peak_bytes=100,
        node_bytes=3,
        memory={"parameters": 100},
        reserved_bytes=128,
        context_bytes=1,
        provenance={"measured": 3},
        waits={"all_reduce": 0.1},
        causes={"the link": 0.1},
        exposures=(exposure,),
        events=(("a", "compute", 0.0, 0.1, "compute"),),
        memory_curve=((0.0, 100),),
        stages=(stage, stage),
        idle=(0.1, 0.2),
        report_data=report_data,
        work=Work(8, 64, 1e6, 1e12, "float32"),
        at_rates=((0.5, 0.4),),
    )
    return Plan(
        name="zero3 x tp",
        model="Model",
        fingerprint="abc",
        world_size=8,
        mesh=(("pp", 2), ("dp", 2), ("tp", 2)),
        zero_stages=(("", 3), ("blocks.0", 3)),
        batch="global",
        buckets=Buckets((("head.weight",),), (("head.weight",),), (("blocks.0.weight",),)),
        compressions=Compressions(("bf16",), ("",), ("int8",), "bf16"),
        levels=(Levels("dp", 2, (("all_reduce", 1024),)),),
        overlaps=(Overlap((1.5,), (1.5,), (0.5,), 0),),
        recompute=(("", "none"), ("blocks.0", "full")),
        activation_bytes=1024,
        precision="bfloat16",
        reduce_precision="bfloat16",
        memory_cap=2**30,
        placements=(("head.weight", Shard(0)), ("blocks.0.weight", Replicate())),
        partitions=(
            Partition(
                "tp",
                2,
                (("head.weight", Shard(1)),),
                "abc",
                4,
                ((OpStrategy.of("R, S(0) -> P(sum)"), ("mm",)),),
            ),
        ),
        pipeline=Pipeline(2, "1f1b", 4, 1, (("head.weight", (1,)), ("blocks.0.weight", (0,))), 4),
        parameter_bytes=parameters,
        prediction=prediction,
        sent_bytes=(("tp", 64),),
        runners_up=(RunnerUp("ddp", 0.4, 200, "slower", 200, ((0.5, 0.5),)),),
        cluster="here (measured)",
        notes=("a note",),
        torch="2.13.0",
    )


def example_profile() -> Profile:
    """A profile that says something in every field."""
    side = Side(
        0.3,
        {"mm": 0.1},
        {"all_reduce": 0.1},
        0.1,
        (Event("a", "tp", 0.0, 0.1, "wait"),),
        ((0.0, 8),),
    )
    message = Message("a", "all_reduce", 8, 0.1, 0.01, "measured")
    again = Again(1.1, {"all_reduce": 1.2}, 0.3, "ddp", 0.2, False, "file")
    return Profile(
        0,
        (0.3,),
        side,
        side,
        (message,),
        {"b": "a"},
        {"operators": 0.2},
        {"measured": 3},
        "here",
        again,
    )


Path_ = tuple[str | int, ...]
