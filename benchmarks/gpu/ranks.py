"""Part `ranks`: the program of rank 0 of 8 without its peers, whose collectives take no time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"

import autopar
from autopar.capture.batch_slices import capture_of_rank
from autopar.core.ir.graph import TrainingGraph
from autopar.core.ir.roles import Input, Saved
from autopar.core.plan.layout import Layout
from autopar.core.random_inputs import random_like
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.collectives import Link
from autopar.cost_model.host import device_name
from autopar.cost_model.measurement.operator_times import OperatorTimes
from autopar.cost_model.memory.liveness import Overhead
from autopar.cost_model.memory.optimizer_memory import OptimizerMemory
from autopar.cost_model.simulator.step import simulate
from autopar.passes.core.pass_pipeline import PassPipeline
from autopar.passes.core.runner import run_passes
from autopar.passes.memory.lower_attention import LowerAttention
from autopar.passes.pipeline import build_pass_pipeline, build_stage_pipeline
from autopar.passes.split_forward_backward import split_forward_backward
from autopar.passes.stage_lowering import split_plan_stages
from autopar.runtime.codegen.program import LoweringOptions, generate, with_axes
from autopar.runtime.process_groups import make_groups, make_mesh
from autopar.session.inspect import planned_strategies
from benchmarks.gpu.setting import MIB, Setting

RANKS = 8
STRATEGIES: Mapping[str, autopar.Strategy] = {
    "ddp": autopar.Strategy(zero=0),
    "zero3": autopar.Strategy(zero=3),
    "tp4": autopar.Strategy(tp=4, zero=0),
    "pp2, stage 0": autopar.Strategy(pp=2, zero=0, micro_batches=2, schedule="1f1b"),
}


def run(setting: Setting) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    for name, strategy in STRATEGIES.items():
        with setting.case(name):
            measure(setting, name, strategy)
    dist.destroy_process_group()


def free_links(device: str) -> Cluster:
    """Return a node whose collectives take no time."""
    node = Cluster.named("dgx-h100", 1)
    return replace(node, device=device, curves={}, topology=None, link=Link(0.0, 0.0, 1e18))


def measure(setting: Setting, name: str, strategy: autopar.Strategy) -> None:
    device = "cpu" if setting.dry else device_name(setting.device)
    cluster, model = free_links(device), setting.gpt().to(setting.device)
    inputs = setting.tokens(rows=8 * RANKS)
    plan = autopar.plan(
        model, RANKS, example_inputs=inputs, strategy=strategy, cluster=cluster, precision="bf16"
    )
    graph = program(plan, model, inputs, setting.device)
    times = OperatorTimes.load(device).measure([graph], budget_s=1.0)
    overhead = Overhead(OptimizerMemory(), device=device)
    predicted = simulate(graph, cluster, times, overhead=overhead)
    setting.reset_memory()
    step = runner(setting, plan, graph)
    host_ms, device_ms = setting.timed(step)
    setting.row(
        name,
        f"{len([*graph.calls()])} operators, mesh {dict(plan.mesh)}",
        host_ms=host_ms,
        device_ms=device_ms,
        predicted_ms=1e3 * predicted.step_s,
        ratio=1e3 * predicted.step_s / device_ms,
        predicted_mib=predicted.memory.peak / MIB,
        **setting.memory(),
    )


def program(
    plan: autopar.Plan, model: nn.Module, inputs: Any, device: torch.device
) -> TrainingGraph:
    """Return the program of rank 0, or that of a micro-batch of its stage.

    Collectives are lowered for NCCL, attention for the device.
    """
    pipeline, autocast = plan.pipeline, getattr(torch, plan.precision or "", None)
    count = pipeline.micro_batches if pipeline is not None else 1
    graph = capture_of_rank(model, inputs, 0, plan.dp_size, autocast=autocast, micro_batches=count)
    found = [own for _, _, own in planned_strategies(model, inputs, plan)]
    if pipeline is None:
        passes = build_pass_pipeline(plan, 0, "nccl", op_strategies=found)
        return run_passes(with_axes(graph, plan), _kernels_of(device, passes))
    stage = split_plan_stages(graph, plan, 0, found, count).stages[0]
    return run_passes(stage, _kernels_of(device, build_stage_pipeline(plan, 0, "nccl")))


def _kernels_of(device: torch.device, passes: PassPipeline) -> PassPipeline:
    attention = LowerAttention("cuda" if device.type == "cuda" else "cpu")
    return PassPipeline(attention if isinstance(p, LowerAttention) else p for p in passes)


def runner(setting: Setting, plan: autopar.Plan, graph: TrainingGraph) -> Callable[[], None]:
    """Return one forward and backward of a program on random inputs."""
    mesh = make_mesh(setting.device, plan.mesh)
    groups = make_groups(setting.device, Layout(plan).axes, mesh)
    options = LoweringOptions(plan, 0, "nccl", groups, "eager", False, ())
    split = split_forward_backward(graph)
    assert split.backward is not None
    forward, backward = generate(split.forward, options), generate(split.backward, options)

    def given(half: TrainingGraph) -> dict[Any, Tensor]:
        vocabulary = setting.sizes["vocabulary"]
        pairs = zip(half.inputs, half.placeholders, strict=True)
        return {
            role: random_like(node.meta["val"], 0, vocabulary if isinstance(role, Input) else 1)
            for role, node in pairs
            if not isinstance(role, Saved)
        }

    first, second = given(split.forward), given(split.backward)

    def step() -> None:
        with torch.no_grad():
            results = forward.run([first[role] for role in split.forward.inputs])
            known = second | dict(zip(split.forward.outputs, results, strict=True))
            del results
            arguments = [known[role] for role in split.backward.inputs]  # type: ignore[union-attr]
            known.clear()
            backward.run(arguments)

    return step
