"""`ReducedModels`: captures of a model with few of its repeated blocks, and their names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial

from torch import nn

from autopar.capture.batch_slices import CaptureCache
from autopar.capture.model_info import describe_parameters
from autopar.capture.repeated_blocks import BlockKind
from autopar.core.ir.graph import ParameterInfo, TrainingGraph
from autopar.errors import CaptureError
from autopar.planner.placement.carry import SolvedAxes
from autopar.planner.search.estimate_captures import kinds_of, sampled_layers, with_num_layers

CaptureReduced = Callable[[int, int, CaptureCache], TrainingGraph]
"""Captures the model as it is, given data-parallel ranks, micro-batches, and captures to reuse."""

Layers = tuple[int, ...]
"""Number of blocks that are kept of each kind."""


@dataclass(frozen=True)
class ReducedModel:
    """A captured micro-batch of a model with few of its blocks.

    Attributes:
        parameters: parameters of the reduced model, by its own names.
        names: name in the whole model of each parameter.
        blocks: name in the whole model of each block; "" outside of blocks.
    """

    graph: TrainingGraph
    parameters: Mapping[str, ParameterInfo]
    names: Mapping[str, str]
    blocks: Mapping[str, str]


@dataclass
class KeptCaptures:
    """Captures of one model.

    Attributes:
        calls: captures of whole batches, by the number of blocks of each kind; () for all blocks.
        models: reduced models, by these numbers, data-parallel ranks and micro-batches.
    """

    calls: dict[Layers, CaptureCache] = field(default_factory=dict)
    models: dict[tuple[Layers, int, int], ReducedModel] = field(default_factory=dict)


_kept: ContextVar[KeptCaptures | None] = ContextVar("kept_captures", default=None)


@contextmanager
def only_few_blocks() -> Iterator[None]:
    """Plans in this context share captures, and lower no model of repeated blocks whole.

    They are of one model, batch and precision. Where nothing fits, no change is tried.
    """
    token = _kept.set(KeptCaptures())
    try:
        yield
    finally:
        _kept.reset(token)


class ReducedModels:
    """Reduced captures of one model, each made once.

    Attributes:
        alone: whether the whole model is never lowered.
        kinds: names of the blocks of each kind, in the whole model.
        captures: captures of whole batches, by the number of blocks of each kind; () for all.
        solved: strategies along model-parallel axes, for any number of blocks.
        leanest: strategies of the fewest bytes, by the number of ranks that ZeRO shards over.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[str], capture: CaptureReduced) -> None:
        self._model, self._capture = model, capture
        self._kinds: list[BlockKind] = kinds_of(model, blocks)
        modules = {id(module): name for name, module in model.named_modules()}
        self._module_names = modules
        self._parameter_names = {id(p): name for name, p in model.named_parameters()}
        self.kinds = [[modules[id(block[0])] for block in kind.modules] for kind in self._kinds]
        self._kept, self.alone = _kept.get() or KeptCaptures(), _kept.get() is not None
        self.captures = self._kept.calls
        self.solved = SolvedAxes()
        self.leanest = defaultdict[int, SolvedAxes](partial(SolvedAxes, for_all_rows=True))
        self._sizes: dict[Layers, int] = {}

    @property
    def fewest(self) -> Layers:
        return next(iter(self.samples))

    @property
    def samples(self) -> dict[Layers, int]:
        """Numbers of blocks to keep of each kind, with the number of times their figures recur."""
        return sampled_layers([*map(len, self.kinds)])

    def get(self, layers: Layers, ranks: int, micro_batches: int) -> ReducedModel:
        """The model with few blocks, captured.

        Raises:
            CaptureError: it does not run with fewer blocks. From then on there are no `kinds`.
        """
        key = layers, ranks, micro_batches
        if key not in self._kept.models:
            try:
                self._kept.models[key] = self._reduced(*key)
            except CaptureError:
                self.kinds, self._kinds = [], []
                raise
        found = self._kept.models[key]
        self._sizes[layers] = len(found.graph.graph.nodes)
        return found

    def _reduced(self, layers: Layers, ranks: int, micro_batches: int) -> ReducedModel:
        captures = self.captures.setdefault(layers, {})
        with with_num_layers(self._model, self._kinds, layers):
            graph = self._capture(ranks, micro_batches, captures)
            parameters = describe_parameters(self._model)
            tensors = dict(self._model.named_parameters())
            modules = dict(self._model.named_modules())
        names = {name: self._parameter_names[id(tensors[name])] for name in parameters}
        own = {"", *(info.block for info in parameters.values())}
        blocks = {block: self._module_names[id(modules[block])] for block in own}
        return ReducedModel(graph, parameters, names, blocks)

    def whole_nodes(self) -> float:
        """Number of nodes of a captured whole model, from those of the reduced ones."""
        if any(layers not in self._sizes for layers in self.samples):
            return 0.0
        (few, _), *others = ((self._sizes[each], times) for each, times in self.samples.items())
        return few + sum((own - few) * times for own, times in others)

    def alike(self, block: str) -> Sequence[str]:
        """Blocks of the same kind in the whole model, or the block alone."""
        return next((kind for kind in self.kinds if block in kind), [block])
