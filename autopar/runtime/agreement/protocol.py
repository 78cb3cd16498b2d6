"""`Protocol`: ranks agree on every call of a module, and on every backward, before they begin."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autopar._torch import pytree
from autopar.capture.batch_shards import BatchShard
from autopar.capture.call import TensorSpec
from autopar.errors import AutoparError, BatchError
from autopar.runtime.agreement.channel import Channel, Entry, channel
from autopar.runtime.agreement.optimizer_steps import OptimizerSteps
from autopar.runtime.agreement.replicas import Replicas, check_samples
from autopar.runtime.batch_checks import PLAIN, checksum
from autopar.runtime.parameters.distribute import HOOK_TABLES, is_remote

SEED_ALIKE = (
    "But batch='global' means that every rank is given the same one and takes its own rows. Seed "
    "the sampler alike on all ranks, or use batch='local' and let each rank bring its rows."
)
PEERS_ADVICE = (
    "Ranks that share one model (tp, cp, ep, pp) must be given the same batch: choose rows by "
    "model.data_parallel_rank and data_parallel_size, not by the rank in the world."
)
ROWS = (
    "The ranks brought different numbers of rows. With batch='local' every rank must bring as "
    "many: drop or pad the last batch (DistributedSampler does), or use batch='global'."
)
STEP_ALIKE = "Make the same optimizer steps with the same learning rates on every rank."


@dataclass
class Protocol:
    """Messages of a module to the other ranks, sent before it communicates.

    Attributes:
        name: of the module, in errors.
        channel: to the other ranks.
        calls: how many there have been.
        steps: of optimizers since the last call.
    """

    name: str
    channel: Channel
    num_calls: int = 0
    optimizer_steps: OptimizerSteps = field(default_factory=OptimizerSteps)

    @staticmethod
    def of(model: nn.Module) -> Protocol | None:
        """The protocol of a new module; None for one rank."""
        opened = channel()
        if opened is None:
            return None
        opened.num_modules += 1
        number = f" (module {opened.num_modules})" if opened.num_modules > 1 else ""
        return Protocol(type(model).__name__ + number, opened)

    @contextlib.contextmanager
    def reporting_errors(self) -> Iterator[None]:
        """Tells the other ranks of an error that this one meets before a call.

        Raises:
            DisagreementError: another rank does not meet an error.
        """
        try:
            yield
        except Exception as error:
            with contextlib.suppress(AutoparError):  # this rank's own error says more
                self.channel.exchange(
                    f"calls {self.name} and raises {type(error).__name__}: {error}"
                )
            raise

    def agree_on_call(self, state: CallState, replicas: Replicas) -> int:
        """Begins to agree on a call of the module; `settle` ends it.

        Args:
            state: of this rank.
            replicas: of which some are compared.

        Returns:
            The number of the call, from 1.

        Raises:
            DisagreementError: the ranks make different calls, or their replicas have parted.
            BatchError: under batch="local", ranks brought different numbers of rows.
        """
        own = replicas.samples(self.num_calls) if torch.is_grad_enabled() else []
        entries = state.entries(self.num_calls + 1, self.optimizer_steps)
        numbers = [number for sample in own for number in sample.numbers]
        self.channel.start_exchange(
            f"calls {self.name}",
            entries,
            shown=numbers,
            then=lambda met: check_samples(met.samples, own),
        )
        self.num_calls += 1
        return self.num_calls

    def agree_on_backward(self, result: Any, number: int, *, compare: bool, settles: bool) -> None:
        """Agrees on each backward through the result of a call, as it begins.

        Args:
            result: of the call.
            number: of the call.
            compare: whether the ranks must scale a loss alike.
            settles: whether the backward itself settles that before it communicates.
        """
        outputs = [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
        outputs = [x for x in outputs if x.requires_grad and x.grad_fn is not None]
        if not outputs:
            return
        event = f"runs backward through call {number} of {self.name}"

        def begins(gradient: torch.Tensor | None) -> None:  # None: it enters by another output
            scale = _scale(gradient) if compare else ""
            advice = "Scale the loss alike on every rank: it is that of the global batch."
            entry = Entry("enter with another gradient", scale, advice=advice)
            self.channel.start_exchange(event, [entry])
            if not settles:
                self.channel.finish_exchange()

        torch.autograd.graph.register_multi_grad_hook(outputs, begins, mode="any")

    def agree_on_clipping(self, max_norm: float, norm_type: float) -> None:
        """Agrees on a clipping of gradients."""
        advice = "Give clip_grad_norm_ the same arguments on every rank."
        values = f"max_norm={float(max_norm)}, norm_type={float(norm_type)}"
        self.channel.exchange(
            f"clips gradients of {self.name}",
            [Entry("clip to another norm", values, advice=advice)],
        )

    def agree_on_state_dict(self) -> None:
        """Agrees on a state dict that takes all ranks to make."""
        self.channel.exchange(
            f"takes the state dict of {self.name}, whose stages are on several ranks"
        )


@dataclass(frozen=True)
class CallState:
    """The state of one rank at a call.

    Attributes:
        leaves: the flattened arguments.
        structure: how they unflatten.
        share: this rank's rows of them.
        batch: "global" or "local".
        twins: number of ranks with the same rows.
        modules: of the model.
        parameters: of the model, by name.
        hold: whether gradients stay on this rank (`no_sync`).
        held: names of parameters with gradients of earlier such calls.
        is_planned: whether it is known how the model is trained.
        stage: where this rank stands along a pipeline: others hold other parameters.
        data_rank: which rows it has.
        all_tangents: whether gradients may enter by every output.
        is_captured: whether unused parameters have a gradient, or none, on all ranks alike.
    """

    leaves: Sequence[Any]
    structure: Any
    shard: BatchShard
    batch: str
    model_parallel_peers: int
    modules: Sequence[nn.Module]
    parameters: Mapping[str, nn.Parameter]
    no_sync: bool
    unreduced_grads: Sequence[str]
    is_planned: bool
    stage: int
    dp_rank: int
    all_tangents: bool
    is_captured: bool

    def entries(self, number: int, steps: OptimizerSteps) -> list[Entry]:
        """What must be equal on all ranks, the most telling first.

        Args:
            number: of the call, from 1.
            steps: of optimizers since the last call.
        """
        same, own = "Call the model alike on every rank.", self.parameters
        everywhere = self.batch == "global"
        held = [p for p in own.values() if not is_remote(p)]
        return [
            Entry("call in another mode", self._mode(), advice=same),
            Entry("call under another no_sync()", self._sync(), advice=same),
            Entry("call with other arguments", self._arguments(), advice=same),
            self._rows(),
            Entry(
                "were given different batches",
                checksum(self.leaves) if everywhere or self.model_parallel_peers > 1 else 0,
                group="" if everywhere else self.dp_rank,
                advice=SEED_ALIKE if everywhere else PEERS_ADVICE,
                shown="a batch with other values",
            ),
            Entry("call under another autocast", self._autocast(), advice=same),
            Entry(
                "train other parameters",
                _frozen(own),
                group=self.stage,
                advice="Freeze the same parameters at the same step on every rank.",
            ),
            Entry(
                "have other gradient hooks",
                _hooks(held),
                group=self.stage,
                advice="Register the same hooks on every rank.",
            ),
            Entry(
                "stepped another optimizer",
                steps.text,
                group=self.stage,
                advice=STEP_ALIKE,
            ),
            Entry(
                "stepped another optimizer",
                steps.text,
                group="one group" if held and steps.num_groups == 1 else f"stage {self.stage}",
                advice=STEP_ALIKE,
            ),
            Entry(
                "hold gradients of other parameters",
                sum(p.grad is not None for p in held) if self.is_captured else 0,
                group=self.stage,
                advice="Call zero_grad() at the same steps on every rank.",
            ),
            Entry(
                "hold back other gradients",
                ", ".join(self.unreduced_grads),
                group=self.stage,
                advice=same,
            ),
            Entry("have made no plan or one more", str(self.is_planned), advice=same),
            Entry("take gradients by other outputs", str(self.all_tangents), advice=same),
            Entry("have called another number of times", number, advice=same),
        ]

    def _mode(self) -> str:
        training = sum(module.training for module in self.modules)
        word = {0: "evaluation", len(self.modules): "training"}.get(training, "")
        if not word:
            flags = "".join("te"[not module.training] for module in self.modules)
            word = f"training in part ({flags})"
        return word + (", with gradients" if torch.is_grad_enabled() else ", without gradients")

    def _sync(self) -> str:
        return "inside of it" if self.no_sync else "outside of it"

    def _arguments(self) -> str:
        """Shapes and dtypes of tensors, without the number of rows; plain values as they are."""
        rows = self.shard.call.has_batch_dim
        words = [_described(x, r) for x, r in zip(self.shard.call.leaves, rows, strict=True)]
        return f"({', '.join(words)}) {_structured(self.structure)}"

    def _rows(self) -> Entry:
        count = 0 if self.batch == "global" else self.shard.rows
        return Entry("brought another number of rows", count, advice=ROWS, error=BatchError)

    def _autocast(self) -> str:
        kind = self.shard.tensors[0].device.type if self.shard.tensors else "cpu"
        enabled = torch.is_autocast_enabled(kind)
        return str(torch.get_autocast_dtype(kind)) if enabled else "no autocast"


def _scale(gradient: torch.Tensor | None) -> str:
    """The gradient of a loss, as text; "" if it is no scalar, or if reading it waits for a GPU."""
    if gradient is None or gradient.dim() or gradient.device.type != "cpu":
        return ""
    return repr(gradient.item())


@functools.lru_cache(maxsize=256)
def _structured(structure: Any) -> str:
    return str(structure)


def _described(leaf: Any, has_rows: bool) -> str:
    if isinstance(leaf, TensorSpec):
        shape = ["rows", *leaf.shape[1:]] if has_rows else list(leaf.shape)
        gradient = ", requires_grad" if leaf.requires_grad else ""
        return f"{str(leaf.dtype)[6:]}[{', '.join(map(str, shape))}]{gradient}"
    return repr(leaf) if isinstance(leaf, PLAIN) else type(leaf).__qualname__


def _frozen(parameters: Mapping[str, nn.Parameter]) -> str:
    """Names of the parameters held here that are not trained."""
    frozen = [n for n, p in parameters.items() if not p.requires_grad and not is_remote(p)]
    return f"all but {', '.join(frozen)}" if frozen else "all"


def _hooks(parameters: Sequence[nn.Parameter]) -> int:
    return sum(len(getattr(p, name, None) or ()) for p in parameters for name in HOOK_TABLES)
