"""`CallState`: the state of one rank at a call, as entries that ranks compare."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.capture.call import BatchShard, TensorSpec
from autopar.errors import BatchError
from autopar.runtime.agreement.optimizer_steps import OptimizerSteps
from autopar.runtime.agreement.record import Entry
from autopar.runtime.batch_checks import PLAIN, checksum
from autopar.runtime.parameters.distribute import HOOK_TABLES, is_remote

CALL_ADVICE = "Call the model alike on every rank."
SEED_ADVICE = (
    "But batch='global' means that every rank is given the same one and takes its own rows. Seed "
    "the sampler alike on all ranks, or use batch='local' and let each rank bring its rows."
)
PEERS_ADVICE = (
    "Ranks that share one model (tp, cp, ep, pp) must be given the same batch: choose rows by "
    "model.data_parallel_rank and data_parallel_size, not by the rank in the world."
)
ROWS_ADVICE = (
    "The ranks brought different numbers of rows. With batch='local' every rank must bring as "
    "many: drop or pad the last batch (DistributedSampler does), or use batch='global'."
)
STEP_ADVICE = "Make the same optimizer steps with the same learning rates on every rank."


@dataclass(frozen=True)
class CallState:
    """The state of one rank at a call.

    Attributes:
        leaves: flattened arguments.
        structure: tree structure of the arguments.
        shard: this rank's rows of the arguments.
        batch: "global" or "local".
        model_parallel_peers: number of ranks with the same rows.
        modules: modules of the model.
        parameters: parameters of the model, by name.
        no_sync: whether gradients stay unreduced.
        unreduced_grads: names of parameters with unreduced gradients of earlier calls.
        is_planned: whether there is a plan or a fallback.
        stage: pipeline rank; other stages have other parameters.
        dp_rank: data-parallel rank.
        all_tangents: whether every output may receive a gradient.
        is_captured: whether all ranks leave the same gradients unset; a fallback may not.
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
        """Values that must be equal on all ranks, the most specific error first.

        Args:
            number: number of the call, from 1.
            steps: optimizer steps since the last call.
        """
        local = [p for p in self.parameters.values() if not is_remote(p)]
        same_groups = "one group" if local and steps.num_groups == 1 else f"stage {self.stage}"
        return [
            Entry("call in another mode", self._mode(), advice=CALL_ADVICE),
            Entry("call under another no_sync()", self._sync(), advice=CALL_ADVICE),
            Entry("call with other arguments", self._arguments(), advice=CALL_ADVICE),
            self._rows(),
            self._batch(),
            Entry("call under another autocast", self._autocast(), advice=CALL_ADVICE),
            Entry(
                "train other parameters",
                _trained(self.parameters),
                group=self.stage,
                advice="Freeze the same parameters at the same step on every rank.",
            ),
            Entry(
                "have other gradient hooks",
                _num_hooks(local),
                group=self.stage,
                advice="Register the same hooks on every rank.",
            ),
            Entry("stepped another optimizer", steps.text, group=self.stage, advice=STEP_ADVICE),
            Entry("stepped another optimizer", steps.text, group=same_groups, advice=STEP_ADVICE),
            Entry(
                "hold gradients of other parameters",
                sum(p.grad is not None for p in local) if self.is_captured else 0,
                group=self.stage,
                advice="Call zero_grad() at the same steps on every rank.",
            ),
            Entry(
                "hold back other gradients",
                ", ".join(self.unreduced_grads),
                group=self.stage,
                advice=CALL_ADVICE,
            ),
            Entry("have made no plan or one more", str(self.is_planned), advice=CALL_ADVICE),
            Entry("take gradients by other outputs", str(self.all_tangents), advice=CALL_ADVICE),
            Entry("have called another number of times", number, advice=CALL_ADVICE),
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
        """Plain arguments, and dtypes and shapes of tensors without the number of rows."""
        call = self.shard.call
        pairs = zip(call.leaves, call.has_batch_dim, strict=True)
        return f"({', '.join(_described(*pair) for pair in pairs)}) {_text(self.structure)}"

    def _rows(self) -> Entry:
        count = 0 if self.batch == "global" else self.shard.rows
        return Entry("brought another number of rows", count, advice=ROWS_ADVICE, error=BatchError)

    def _batch(self) -> Entry:
        is_global = self.batch == "global"
        return Entry(
            "were given different batches",
            checksum(self.leaves) if is_global or self.model_parallel_peers > 1 else 0,
            group="" if is_global else self.dp_rank,
            advice=SEED_ADVICE if is_global else PEERS_ADVICE,
            shown="a batch with other values",
        )

    def _autocast(self) -> str:
        device = self.shard.tensors[0].device.type if self.shard.tensors else "cpu"
        enabled = torch.is_autocast_enabled(device)
        return str(torch.get_autocast_dtype(device)) if enabled else "no autocast"


@functools.lru_cache(maxsize=256)
def _text(structure: Any) -> str:
    return str(structure)


def _described(leaf: Any, has_batch_dim: bool) -> str:
    if isinstance(leaf, TensorSpec):
        shape = ["rows", *leaf.shape[1:]] if has_batch_dim else list(leaf.shape)
        gradient = ", requires_grad" if leaf.requires_grad else ""
        return f"{str(leaf.dtype)[6:]}[{', '.join(map(str, shape))}]{gradient}"
    return repr(leaf) if isinstance(leaf, PLAIN) else type(leaf).__qualname__


def _trained(parameters: Mapping[str, nn.Parameter]) -> str:
    """The local parameters that are trained, in words."""
    frozen = [n for n, p in parameters.items() if not p.requires_grad and not is_remote(p)]
    return f"all but {', '.join(frozen)}" if frozen else "all"


def _num_hooks(parameters: Sequence[nn.Parameter]) -> int:
    return sum(len(getattr(p, name, None) or ()) for p in parameters for name in HOOK_TABLES)
