"""Plans of published runs, pinned to their configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import fx

import autopar
from autopar.capture.model_info import describe_parameters
from autopar.core.common.deadline import Deadline
from autopar.core.plan.plan import Plan
from autopar.core.schedules import Orders
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.group_shape import GroupShape
from autopar.cost_model.simulator.pipeline import (
    PipelineSimulation,
    Seconds,
    StageCost,
    simulate_pipeline,
)
from autopar.cost_model.topology.devices import find_device
from autopar.cost_model.topology.topology import devices_by_node
from autopar.passes.memory.checkpoint_activations import MinCut
from autopar.planner.evaluate import pipeline_evaluator as pipelines
from autopar.planner.evaluate.p2p import P2PCost
from autopar.planner.problem import PlanningProblem
from autopar.session.offline import OfflineDriver
from benchmarks.published.gpt import MasterAdamW
from benchmarks.published.run import Run

NO_CAP = 10**17
"""Bytes of a cap that every plan fits under: what ran has fitted."""


class _Arithmetic(OfflineDriver):
    """A planner that lowers two and three blocks of each kind, and never the whole model."""

    def refine(self, plan: Plan) -> Plan | None:
        return None


def cluster_of(run: Run) -> Cluster:
    """Return the machines of a run, with the software that it used."""
    cluster = Cluster.named(run.cluster)
    cluster = Cluster.named(run.cluster, max(1, run.gpus // cluster.ranks_per_node))
    if run.device:
        figures = find_device(run.device)
        assert figures is not None
        memory = figures.memory_bytes
        cluster = replace(cluster, device=run.device, figures=figures, device_memory_bytes=memory)
    if run.node_gbit:
        cluster = with_network(cluster, run.node_gbit * 1e9 / 8)
    return replace(cluster, versions={**cluster.versions, **run.versions})


def with_network(cluster: Cluster, bytes_per_s: float) -> Cluster:
    """Return the cluster with another network of each node, whose collectives are modelled."""
    assert cluster.topology is not None
    topology = cluster.topology.copy()
    nodes = len(devices_by_node(topology))
    links = [link for *ends, link in topology.edges(data=True) if "fabric" in ends]
    for link in links:
        link["bytes_per_s"] = bytes_per_s * nodes / len(links)
    curves = {key: own for key, own in cluster.curves.items() if key.shape.nodes == 1}
    return replace(cluster, topology=topology, curves=curves)


def pinned(run: Run) -> Plan:
    """Return the plan of a run as published, predicted."""
    if run.strategy.stages > 1 or run.tp_overlap:  # needs stages, or collectives one by one
        with _scattered(run), _awaited(run):
            return plan_of(run, strategy=run.strategy, memory=NO_CAP)
    return _by_arithmetic(run)


def plan_of(run: Run, **options: Any) -> Plan:
    """Return a plan of the model of a run on its machines, as `autopar.plan` makes it."""
    model, inputs = run.make()
    return autopar.plan(
        model,
        run.gpus,
        example_inputs=inputs,
        optimizer=optimizer_of(run),
        cluster=cluster_of(run),
        precision="fp32",  # models cast by themselves
        backend=run.backend,
        **options,
    )


@contextmanager
def _scattered(run: Run) -> Iterator[None]:
    """Price messages between stages as Megatron sends them: ranks of tp send a part each.

    Without sequence parallelism they then gather the whole. Plans of autopar send the whole.
    """
    tp, gathers = run.strategy.tp or 1, not run.strategy.sequence_parallel
    whole = P2PCost.seconds

    def seconds(link: P2PCost, nbytes: int, *ranks: int) -> float:
        group = GroupShape(tp, tp, link.cluster.world_size // tp)
        gathered = link.cluster.seconds("all_gather", nbytes, group, "bfloat16").seconds
        return whole(link, nbytes // tp, *ranks) + gathered * gathers

    with patch.object(P2PCost, "seconds", seconds if run.scatters and tp > 1 else whole):
        yield


@contextmanager
def _awaited(run: Run) -> Iterator[None]:
    """Have both ends of a message wait for it, as DeepSpeed's do (dist.send and dist.recv)."""

    def waits(
        orders: Orders,
        stages: Sequence[StageCost],
        transfer: Seconds,
        issue_s: float,
        *others: float,
        recording: bool,
    ) -> PipelineSimulation:
        sent = max(max(stage.sent_bytes, stage.returned_bytes) for stage in stages)
        issue_s += transfer(sent, 0, 1)
        return simulate_pipeline(orders, stages, transfer, issue_s, *others, recording=recording)

    with patch.object(pipelines, "simulate_pipeline", waits if run.awaits else simulate_pipeline):
        yield


@contextmanager
def _half_products(run: Run) -> Iterator[None]:
    """Recompute every other matrix product of a block, as torchtitan's selective policy does."""
    fixed = MinCut.fixed

    def half(cut: MinCut, node: fx.Node) -> bool:
        return fixed(cut, node) and not _is_even_product(cut, node)

    with patch.object(MinCut, "fixed", half if run.half_products else fixed):
        yield


def _is_even_product(cut: MinCut, node: fx.Node) -> bool:
    product, block = torch.ops.aten.mm.default, node.meta["block"]
    if node.target is not product or not block:
        return False
    each = [n for n in cut.nodes if n.target is product and n.meta["block"] == block]
    return each.index(node) % 2 == 1


def optimizer_of(run: Run) -> Any:
    return torch.optim.AdamW if run.sizes.mixed else MasterAdamW


def _by_arithmetic(run: Run) -> Plan:
    model, inputs = run.make()
    problem = PlanningProblem(
        model=type(model).__name__,
        parameters=describe_parameters(model),
        world_size=run.gpus,
        strategy=run.strategy,
        memory=NO_CAP,
        batch="global",
        precision=None,
        optimizer=optimizer_of(run),
        cluster=cluster_of(run),
        device=torch.device("meta"),
        comm_backend="nccl",
        backend=run.backend,
    )
    rest = None, None, Deadline(3600.0), lambda _: None
    with _half_products(run):
        return _Arithmetic(problem, model, inputs, *rest).plan(problem)
