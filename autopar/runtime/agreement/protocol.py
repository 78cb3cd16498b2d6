"""`Protocol`: ranks agree on every call and backward of a module before it communicates."""

from __future__ import annotations

import contextlib
import functools
import math
import pickle
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import attrgetter, is_not
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar._torch import HOOK_TABLES, pytree
from autopar.capture.call import BatchShard, Call, TensorSpec
from autopar.core.common.world import rank
from autopar.errors import AutoparError, BatchError, DisagreementError
from autopar.runtime.agreement.channel import (
    Channel,
    Exchanged,
    channel,
    explaining_failed_wait,
)
from autopar.runtime.agreement.found_inf import agree_on_overflows
from autopar.runtime.agreement.optimizer_steps import OptimizerSteps
from autopar.runtime.agreement.record import Entry
from autopar.runtime.agreement.replicas import PendingSamples, Replicas, check_samples
from autopar.runtime.agreement.transforms import check_not_batched
from autopar.runtime.batch_checks import (
    PLAIN,
    LateNumbers,
    device_hashes,
    host_hash,
    is_on_host,
)
from autopar.runtime.watch.stragglers import Pace, Stragglers

if TYPE_CHECKING:
    from autopar.runtime.context import ExecutionContext

CALL_ADVICE = "Call the model alike on every rank."
NUMBER_ADVICE = "A number that may differ, such as mixup's weight, is to be a tensor."
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
SIZES_ADVICE = "Sizes may differ under batch='local' without tp, cp, ep and pp."
FREEZE_ADVICE = "Freeze the same parameters at the same step on every rank."
HOOKS_ADVICE = "Register the same hooks on every rank."
ZERO_ADVICE = "Call zero_grad() at the same steps on every rank."
WRITE_ADVICE = "A rank has a part of each: change parameters at the same places on every rank."
STEP_ADVICE = "Make the same optimizer steps with the same learning rates on every rank."


NEAR = 1e-3
"""Relative difference of equal gradients on unlike machines, far below that of another loss."""

WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""Dtypes that norms of narrower ones are computed in."""

_grad, _training, _version = map(attrgetter, ("grad", "training", "_version"))
_hook_tables = [attrgetter(name) for name in HOOK_TABLES]


class OtherSizesError(DisagreementError):
    """Ranks bring tensors of other sizes under batch="local"; their calls are alike otherwise."""


class Told(NamedTuple):
    """Told by a rank to the others at a call, beside values to compare.

    Attributes:
        trained: whether each parameter of its stages is trained, by name.
        pace: its last steps, None at most calls.
    """

    trained: Mapping[str, bool]
    pace: Pace | None


@dataclass
class Protocol:
    """Exchanges of a module with the other ranks.

    Accelerators hash batches and sample replicas while the host goes on, so ranks compare these
    numbers one call late.

    Attributes:
        trained_elsewhere: whether the other ranks' parameters are trained, by name.
    """

    name: str
    channel: Channel
    num_calls: int = 0
    trained_elsewhere: dict[str, bool] = field(default_factory=dict)
    _sent_trained: Mapping[str, bool] = field(default_factory=dict)
    _sharded: list[int] = field(default_factory=list)
    _versions: int = 0
    _late_hashes: LateNumbers | None = None
    _late_samples: PendingSamples | None = None
    optimizer_steps: OptimizerSteps = field(default_factory=OptimizerSteps)
    stragglers: Stragglers = field(default_factory=Stragglers)

    @staticmethod
    def of(model: nn.Module) -> Protocol | None:
        """The protocol of a new module, None for one rank."""
        opened = channel()
        if opened is None:
            return None
        agree_on_overflows()
        opened.num_modules += 1
        number = f" (module {opened.num_modules})" if opened.num_modules > 1 else ""
        return Protocol(type(model).__name__ + number, opened)

    def of_copy(self) -> Protocol:
        """The protocol of a copy of the module."""
        return Protocol(self.name, self.channel, self.num_calls)

    @contextlib.contextmanager
    def reporting_errors(self) -> Iterator[None]:
        """Reports an error of this rank before a call, so that the other ranks raise too."""
        try:
            yield
        except Exception as error:
            with contextlib.suppress(AutoparError):  # this rank's own error says more
                self.channel.exchange(
                    f"calls {self.name} and raises {type(error).__name__}: {error}"
                )
            raise

    def hash_batch(self, leaves: Sequence[Any]) -> tuple[int, str]:
        """Hashes of this call's tensors on the host, and of the last call's on accelerators."""
        late, self._late_hashes = self._late_hashes, device_hashes(leaves)
        return host_hash(leaves), "" if late is None else str(late.read())

    def writes(self, parameters: Iterable[torch.Tensor], stage: int) -> Entry:
        """The number of changes in place of sharded parameters since the last of these entries.

        A rank alone that changes its parts changes a model that no rank has whole.
        """
        sharded = [each for each in parameters if isinstance(each, DTensor)]
        before, self._sharded = self._sharded, list(map(id, sharded))
        total, self._versions = self._versions, sum(map(_version, sharded))
        count = self._versions - total if before == self._sharded else 0
        event = "changed sharded parameters another number of times"
        return Entry(event, count, stage, WRITE_ADVICE)

    def agree_on_writes(self, parameters: Iterable[torch.Tensor], stage: int) -> None:
        """Agrees on changes of sharded parameters since the last call."""
        event = f"checks the replicas of {self.name}"
        self.channel.exchange(event, [self.writes(parameters, stage)])

    def agree_on_call(self, entries: Sequence[Entry], replicas: Replicas, told: Told) -> int:
        """Starts the exchange about a call and some of its replicas; returns its number, from 1.

        Ranks send what they tell if parameters are frozen or unfrozen, or with a pace.

        Raises:
            DisagreementError: the ranks make different calls, or their replicas differ.
            BatchError: ranks brought different numbers of rows under batch="local".
        """
        pending, self._late_samples = self._late_samples, None
        fresh = replicas.samples(self.num_calls) if torch.is_grad_enabled() else None
        if fresh is not None and fresh.is_late:
            self._late_samples = fresh
        elif fresh is not None:
            pending = fresh
        own = [] if pending is None else pending.read()
        is_changed, self._sent_trained = told.trained != self._sent_trained, told.trained

        def compare(exchanged: Exchanged) -> None:
            check_samples(exchanged.samples, own)
            told_by_ranks = [pickle.loads(each) for each in exchanged.payloads if each]
            for trained, _ in told_by_ranks:
                self.trained_elsewhere |= trained
            paces = [pace for _, pace in told_by_ranks if pace is not None]
            if len(paces) == self.channel.size:
                with explaining_failed_wait():
                    self.stragglers.saw(paces, self.channel.group)

        self.channel.start_exchange(
            f"calls {self.name}",
            entries,
            # A payload costs a second gather, so most calls send none.
            payload=pickle.dumps(told) if is_changed or told.pace else b"",
            samples=[number for sample in own for number in sample.numbers],
            then=compare,
        )
        self.num_calls += 1
        return self.num_calls

    def agree_on_backward(
        self,
        result: Any,
        number: int,
        *,
        compares_scale: bool,
        compares_rows: bool,
        finishes: bool,
    ) -> None:
        """Agrees on each backward through the result of a call, as it begins."""
        outputs = [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
        outputs = [x for x in outputs if x.requires_grad and x.grad_fn is not None]
        if not outputs:
            return
        event = f"runs backward through call {number} of {self.name}"

        def on_backward(gradient: torch.Tensor | None) -> None:
            # the gradient is None if another output receives it
            if gradient is not None:
                check_not_batched((gradient,))
            scale = ""
            if compares_scale and gradient is not None and is_on_host(gradient):
                scale = "" if gradient.dim() else repr(gradient.item())
            advice = "Scale the loss alike on every rank: it is that of the global batch."
            entry = Entry("enter with another gradient", scale, advice=advice)
            norm = _norm_of_rows(gradient) if compares_rows else []
            with self.channel.turn:
                self.channel.start_exchange(event, [entry], samples=norm, then=_check_norms)
                if not finishes:
                    self.channel.finish_exchange()

        if len(outputs) == 1:
            outputs[0].register_hook(on_backward)  # costs a tenth
        else:
            torch.autograd.graph.register_multi_grad_hook(outputs, on_backward, mode="any")

    def agree_on_clipping(self, max_norm: float, norm_type: float) -> None:
        advice = "Give clip_grad_norm_ the same arguments on every rank."
        values = f"max_norm={float(max_norm)}, norm_type={float(norm_type)}"
        self.channel.exchange(
            f"clips gradients of {self.name}",
            [Entry("clip to another norm", values, advice=advice)],
        )

    def agree_on_values(self) -> None:
        self.channel.exchange(f"gives values to the parameters of {self.name}")

    def have_equal(self, tensors: Sequence[torch.Tensor]) -> list[bool]:
        """Whether each tensor has the same values on every rank; all ranks call this at once."""
        hashes = [host_hash([tensor]) for tensor in tensors]
        event = f"compares arguments of {self.name} that have no rows"
        exchanged = self.channel.exchange(event, payload=pickle.dumps(hashes))
        by_rank = [pickle.loads(payload) for payload in exchanged.payloads]
        return [len(set(column)) == 1 for column in zip(*by_rank, strict=True)]

    def agree_on_rows(self, number: int, event: str) -> None:
        """Agrees on a collective over rows at the border of a call."""
        self.channel.exchange(f"{event} of call {number} of {self.name}")

    def agree_on_states(self, action: str) -> None:
        """Agrees on a collective over the states of the model, such as "gathers the state of"."""
        self.channel.exchange(f"{action} {self.name}")


def _norm_of_rows(gradient: torch.Tensor | None) -> list[int]:
    """The bits of the norm of a gradient of rows on the host, none for any other."""
    if gradient is None or gradient.dim() == 0 or not is_on_host(gradient):
        return []
    with torch.no_grad():
        norm = torch.linalg.vector_norm(gradient.detach(), dtype=WIDE.get(gradient.dtype))
    return list(struct.unpack("q", struct.pack("d", norm.item())))


def _check_norms(exchanged: Exchanged) -> None:
    """Raises DisagreementError on every rank if ranks differentiate another loss of all rows."""
    norms = [struct.unpack("d", struct.pack("q", own[0]))[0] for own in exchanged.samples]
    odd = [r for r, norm in enumerate(norms) if not math.isclose(norm, norms[0], rel_tol=NEAR)]
    # NaN is close to nothing, not even to NaN: ranks that all have NaN agree.
    if odd and not all(map(math.isnan, norms)):
        raise DisagreementError(
            f"rank(s) {odd} differentiate another loss than rank 0: the gradient of the returned "
            f"rows has the norm {norms[odd[0]]:.6g} on rank {odd[0]}, {norms[0]:.6g} on rank 0. "
            "Results have all rows on every rank: compute the same loss of them everywhere, with "
            "the targets of the whole batch, and seed what the loop draws alike. For each rank's "
            "rows alone give autopar.compile outputs='own'."
        )


def call_entries(
    context: ExecutionContext,
    leaves: Sequence[Any],
    structure: Any,
    shard: BatchShard,
    protocol: Protocol,
    *,
    no_sync: bool,
    has_fallback: bool,
) -> list[Entry]:
    """Values that must be equal on all ranks at a call, the most specific error first."""
    steps, number = protocol.optimizer_steps, protocol.num_calls + 1
    options, stage, local = context.options, context.stage, context.index.local.values()
    frozen = [name for name, trained in context.trained_here.items() if not trained]
    num_hooks = sum(len(table) for get in _hook_tables for table in map(get, local) if table)
    # A stage that trains nothing steps nothing, which must not pass for another optimizer.
    trains_here = any(context.trained_here.values())
    same_groups = "one group" if trains_here and steps.num_groups == 1 else f"stage {stage}"
    is_global = options.batch == "global"
    is_planned = context.plan is not None or has_fallback
    sync = "inside of it" if no_sync else "outside of it"
    rows = 0 if is_global else shard.rows
    trained = f"all but {', '.join(frozen)}" if frozen else "all"
    # ranks under a fallback may leave different gradients unset
    num_grads = 0 if has_fallback else sum(map(is_not, map(_grad, local), repeat(None)))
    unreduced = ", ".join(context.held_gradients.names)
    shares_rows = is_global or options.model_parallel_peers > 1
    this_batch, last_batch = protocol.hash_batch(leaves) if shares_rows else (0, "")
    same_rows = "" if is_global else options.dp_rank(rank())
    compares_sizes = is_global or options.model_parallel_peers > 1
    arguments = _arguments(shard.call, structure, compares_sizes)
    answers = tuple(answer.value for answer in shard.call.answers)
    # torch's DDP takes any sizes
    sizes = "" if options.ragged or has_fallback else _sizes(shard.call)
    batch_advice = SEED_ADVICE if is_global else PEERS_ADVICE
    argument_advice = CALL_ADVICE if is_global else f"{CALL_ADVICE} {NUMBER_ADVICE}"
    return [
        Entry("call in another mode", _mode(context.index.modules), advice=CALL_ADVICE),
        Entry("call under another no_sync()", sync, advice=CALL_ADVICE),
        Entry("call with other arguments", arguments, advice=argument_advice),
        Entry("brought another number of rows", rows, advice=ROWS_ADVICE, error=BatchError),
        Entry(
            "were given different batches",
            this_batch,
            group=same_rows,
            advice=batch_advice,
            shown="",
        ),
        Entry(
            "were given different batches in the call before",
            last_batch,
            group=same_rows,
            advice=batch_advice,
            shown="",
        ),
        Entry("read other values of arguments", str(answers), advice=CALL_ADVICE),
        Entry("call under another autocast", _autocast(shard), advice=CALL_ADVICE),
        Entry("train other parameters", trained, stage, FREEZE_ADVICE),
        Entry("have other gradient hooks", num_hooks, stage, HOOKS_ADVICE),
        Entry("stepped another optimizer", steps.text, stage, STEP_ADVICE),
        Entry("stepped another optimizer", steps.text, same_groups, STEP_ADVICE),
        protocol.writes(local, stage),
        Entry("hold gradients of other parameters", num_grads, stage, ZERO_ADVICE),
        Entry("hold back other gradients", unreduced, stage, CALL_ADVICE),
        Entry("have made no plan or one more", str(is_planned), advice=CALL_ADVICE),
        Entry("take gradients by other outputs", str(context.all_tangents), advice=CALL_ADVICE),
        Entry("have called another number of times", number, advice=CALL_ADVICE),
        Entry("brought other sizes", sizes, advice=SIZES_ADVICE, error=OtherSizesError),
    ]


def _mode(modules: Sequence[nn.Module]) -> str:
    training = sum(map(_training, modules))
    word = {0: "evaluation", len(modules): "training"}.get(training, "")
    if not word:
        flags = "".join("te"[not module.training] for module in modules)
        word = f"training in part ({flags})"
    return word + (", with gradients" if torch.is_grad_enabled() else ", without gradients")


def _arguments(call: Call, structure: Any, compares_sizes: bool) -> dict[str, str]:
    """Plain arguments, and dtypes and shapes of tensors without the number of rows, by name."""
    if compares_sizes:
        texts = map(_described, call.leaves, call.row_dims)
    else:
        texts = map(_kind, call.leaves)
    # leaves alone do not show empty containers, nor what kinds containers are
    return {**dict(zip(_names(call.structure), texts, strict=True)), "structure": _text(structure)}


@functools.lru_cache(maxsize=256)
def _names(structure: Any) -> tuple[str, ...]:
    """A name for each leaf of (args, kwargs): "argument 0", "labels", "batch['mask']"."""
    children = structure.children()
    if len(children) != 2 or children[1].type is not dict:  # tangents follow (args, kwargs)
        return tuple(_names_below("call", structure))
    args, kwargs = children
    named = [(f"argument {i}", child) for i, child in enumerate(args.children())]
    named += zip(kwargs.context, kwargs.children(), strict=True)
    return tuple(leaf for name, child in named for leaf in _names_below(name, child))


def _names_below(name: str, structure: Any) -> Iterator[str]:
    if structure.is_leaf():
        yield name
        return
    keys = structure.context if structure.type is dict else range(structure.num_children)
    for key, child in zip(keys, structure.children(), strict=True):
        yield from _names_below(f"{name}[{key!r}]", child)


def _kind(leaf: Any) -> str:
    """A plain argument that is no number, or the dtype and number of dims of a tensor."""
    if isinstance(leaf, TensorSpec):
        return f"{str(leaf.dtype)[6:]}{':' * len(leaf.shape)} {leaf.requires_grad}"
    return "int" if type(leaf) is int else _described(leaf, None)


def _sizes(call: Call) -> str:
    """Numbers among the arguments, and sizes and static values of tensors without their rows."""
    pairs = zip(call.leaves, call.row_dims, strict=True)
    sized = [p for p in pairs if isinstance(p[0], TensorSpec) or type(p[0]) is int]
    return ", ".join(_described(*pair) for pair in sized)


def _autocast(shard: BatchShard) -> str:
    device = shard.tensors[0].device.type if shard.tensors else "cpu"
    enabled = torch.is_autocast_enabled(device)
    return str(torch.get_autocast_dtype(device)) if enabled else "no autocast"


@functools.lru_cache(maxsize=256)
def _text(structure: Any) -> str:
    return str(structure)


def _described(leaf: Any, row_dim: int | None) -> str:
    if isinstance(leaf, TensorSpec):
        shape: list[object] = list(leaf.shape)
        if row_dim is not None:
            shape[row_dim] = "rows"
        gradient = ", requires_grad" if leaf.requires_grad else ""
        return f"{str(leaf.dtype)[6:]}[{', '.join(map(str, shape))}]{gradient}{leaf.values or ''}"
    return repr(leaf) if isinstance(leaf, PLAIN) else type(leaf).__qualname__
