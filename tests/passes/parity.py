"""A model under a plan on n simulated ranks, and the same model plain on the global batch."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.capture.batch_slices import capture_slice
from autopar.capture.call import BatchShard, Call, batch_shard_of
from autopar.capture.model_info import describe_parameters
from autopar.capture.trace import Capture, capture
from autopar.core.ir.graph import TrainingGraph
from autopar.core.ir.placement import Shard
from autopar.core.ir.roles import (
    BatchFraction,
    BatchIndex,
    Buffer,
    Gradient,
    Input,
    InputRole,
    Output,
    OutputRole,
    Parameter,
    Tangent,
    Update,
)
from autopar.core.plan.plan import Plan
from autopar.passes.communication.bucket_collectives import BucketCollectives, propose_buckets
from autopar.passes.core.pass_base import Pass
from autopar.passes.core.runner import run_passes
from autopar.passes.pipeline import build_pass_pipeline
from tests.harness.models import Batch
from tests.harness.reference import relative_error, snapshot
from tests.passes.simulated import Results, Values, chunks, run_ranks

AXIS = "dp"
CPU = torch.device("cpu")
EXACT = 1e-12


@dataclass
class World:
    """A model and a global batch before n ranks; captures are made once for each row count."""

    model: nn.Module
    batch: Batch
    ranks: int
    loss: Callable[[Any], Tensor] = lambda out: out
    all_tangents: bool = False
    differentiate: bool = True
    local: bool = False

    def __post_init__(self) -> None:
        self.leaves, self.structure = pytree.tree_flatten(self.batch)
        self.parameters = describe_parameters(self.model)
        self.state = snapshot({**dict(self.model.named_parameters()), **dict(buffers(self.model))})
        self.captures: dict[int, Capture] = {}
        self.attempts: dict[Call, Capture] = {}

    def share(self, rank: int) -> BatchShard:
        """A rank's rows."""
        return batch_shard_of(
            self.leaves, self.structure, mode="global", rank=rank, ranks=self.ranks
        )

    def capture(self, rank: int) -> Capture:
        """The graph of a rank's rows."""
        if rank not in self.captures:
            share = self.share(rank)
            self.captures[rank] = capture_slice(
                self.attempt, share.call, share.slices, local=self.local
            )
        return self.captures[rank]

    def attempt(self, call: Call) -> Capture:
        """Captures a call, each once."""
        if call not in self.attempts:
            self.attempts[call] = capture(
                self.model,
                call,
                self.parameters,
                device=CPU,
                differentiate=self.differentiate,
                all_tangents=self.all_tangents,
            )
        return self.attempts[call]

    def graph(self, rank: int) -> TrainingGraph:
        """The captured graph, before all passes."""
        return replace(self.capture(rank).graph, axes={AXIS: self.ranks})

    def plan(
        self, zero: int, recompute: str = "none", bucket: int = 1 << 12, **fields: Any
    ) -> Plan:
        """A plan of one stage and level for all blocks."""
        blocks = ["", *dict.fromkeys(p.block for p in self.parameters.values() if p.block)]
        plan = Plan(
            name="test",
            model=type(self.model).__name__,
            fingerprint="",
            world_size=self.ranks,
            mesh=((AXIS, self.ranks),),
            zero_stages=tuple((block, zero) for block in blocks),
            recompute=tuple((block, recompute) for block in blocks),  # type: ignore[misc]
            **fields,
        )
        before = takewhile(
            lambda p: not isinstance(p, BucketCollectives), build_pass_pipeline(plan, 0, "gloo")
        )
        graph = run_passes(self.graph(0), before)
        return replace(plan, buckets=propose_buckets(graph, bucket, bucket))

    def lower(self, passes: Callable[[int], Iterable[Pass]]) -> list[TrainingGraph]:
        """Every rank's graph after the passes that `passes(rank)` gives."""
        return [run_passes(self.graph(rank), passes(rank)) for rank in range(self.ranks)]

    def run(
        self, graphs: Sequence[TrainingGraph], inputs: Sequence[Values] | None = None
    ) -> list[Results]:
        """Runs all ranks, a gradient of one entering by the loss."""
        values = inputs or [self.values(graph, rank) for rank, graph in enumerate(graphs)]
        return run_ranks(graphs, values)

    def values(self, graph: TrainingGraph, rank: int) -> dict[InputRole, Tensor]:
        """The inputs of a rank's graph."""
        share = self.share(rank)
        positions = [i for i, x in enumerate(self.leaves) if isinstance(x, Tensor)]
        inputs = dict(zip(positions, share.tensors, strict=True))
        found: dict[InputRole, Tensor] = {}
        for role, node in zip(graph.inputs, graph.placeholders, strict=True):
            match role:
                case Parameter(name):
                    found[role] = self.state[name].clone()
                    if isinstance(layout := graph.layouts.get(name), Shard):
                        found[role] = list(chunks(found[role], self.ranks, layout.dim))[rank]
                case Buffer(name):
                    found[role] = self.state[name].clone()
                case Input(index):
                    found[role] = inputs[index].detach().clone()
                case BatchFraction():
                    found[role] = torch.tensor(share.rows / share.slices.rows, dtype=torch.float64)
                case BatchIndex():
                    found[role] = share.slices.unit_indices()
                case Tangent(index):
                    fake = node.meta["val"]
                    is_loss = index == self.plain().loss_index
                    found[role] = torch.full(fake.shape, float(is_loss), dtype=fake.dtype)
        return found

    def plain(self) -> "Plain":
        """The plain model's results on the global batch."""
        if not hasattr(self, "_plain"):
            self._plain = plain(self)
        return self._plain


@dataclass
class Plain:
    """What the plain model gives for the global batch."""

    outputs: list[Any]
    loss_index: int
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def plain(world: World) -> Plain:
    """Runs the plain model once, forward and backward, and puts its state back."""
    args, kwargs = pytree.tree_map(
        lambda x: x.detach().clone() if isinstance(x, Tensor) else x, world.batch
    )
    out = world.model(*args, **kwargs)
    loss = world.loss(out)
    outputs = pytree.tree_leaves(out)
    parameters = dict(world.model.named_parameters())
    trained = {n: p for n, p in parameters.items() if p.requires_grad}
    gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    found = {n: g for n, g in zip(trained, gradients, strict=True) if g is not None}
    after = snapshot(dict(buffers(world.model)))
    with torch.no_grad():
        for name, buffer in buffers(world.model):
            buffer.copy_(world.state[name])
    index = next((i for i, x in enumerate(outputs) if x is loss), -1)
    return Plain([x.detach() if isinstance(x, Tensor) else x for x in outputs], index, found, after)


def buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Buffers by name."""
    return list(model.named_buffers())


def whole(name: str, graph: TrainingGraph, parts: list[Tensor]) -> Tensor:
    """A parameter's gradient from what the ranks have of it."""
    if isinstance(layout := graph.layouts.get(name), Shard):
        return torch.cat(parts, layout.dim)
    same = (torch.allclose(part, parts[0], rtol=0, atol=0, equal_nan=True) for part in parts)
    assert all(same), f"ranks disagree about {name}"
    return parts[0]


def assert_parity(world: World, graphs: list[TrainingGraph], tolerance: float = EXACT) -> None:
    """The ranks' results are the plain model's on the global batch."""
    errors = {k: e for k, e in parity_errors(world, graphs).items() if not e <= tolerance}
    assert not errors, f"not as on one device: {errors}; notes: {graphs[0].notes}"


def parity_errors(world: World, graphs: list[TrainingGraph]) -> dict[OutputRole, float]:
    """The relative error of everything that the ranks return."""
    results = world.run(graphs)
    want = world.plain()
    errors: dict[OutputRole, float] = {}
    gradients = set()
    for role in graphs[0].outputs:
        parts = [result[role] for result in results]
        if parts[0] is None:
            continue
        match role:
            case Gradient(Parameter(name)):
                gradients.add(name)
                target = want.gradients.get(name, torch.zeros(graphs[0].parameters[name].shape))
                errors[role] = relative_error(whole(name, graphs[0], parts), target)
            case Output(index):
                target = want.outputs[index]
                got = parts if parts[0].shape == target.shape else [torch.cat(parts)]
                errors[role] = max(relative_error(part, target) for part in got)
            case Update(Buffer(name)):
                errors[role] = max(relative_error(p, want.buffers[name]) for p in parts)
    assert want.gradients.keys() <= gradients, want.gradients.keys() - gradients
    return errors
