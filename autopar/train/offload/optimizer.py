"""`OffloadedOptimizer`: any optimizer of torch with its states on a lower level between steps."""

from __future__ import annotations

import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autopar.core.common.block_storage import split_blocks
from autopar.core.common.checks import nbytes
from autopar.errors import StrategyError
from autopar.runtime.agreement.consensus import is_multi_rank, run_on_all_ranks
from autopar.runtime.agreement.optimizer_steps import trains_a_module
from autopar.runtime.parameters.distribute import is_remote, local_part
from autopar.train.offload.block import StateBlock, hyperparameters
from autopar.train.offload.separable import check_separable
from autopar.train.offload.state_transfers import StateTransfers


class OffloadedOptimizer(Optimizer):
    """Steps parameters block by block; the states of other blocks lie on a lower level of memory.

    While a block is stepped, the next is read and the last is written. The numbers are the inner
    optimizer's. Between steps, states of more than one number are there alone.

    Example:
        optimizer = autopar.OffloadedOptimizer(
            torch.optim.AdamW, model.parameters(), folder="/nvme", lr=3e-4
        )

    Args:
        kind: class of an optimizer that treats parameters one by one.
        params: parameters, or groups of them.
        folder: folder on the storage; the file has no name and vanishes with its process. None
            for pinned memory of the host, under GPUs.
        block_bytes: bytes of parameters to step at once, or a text such as "64MiB". A block that
            holds the largest parameter, and some small ones, may be larger.
        master_dtype: dtype of copies of the parameters on storage that are stepped in their place,
            such as torch.float32 for a model in bf16; None for none.
        checked: compare a checksum of all states that are read.
        options: further arguments of `kind`.

    Raises:
        StrategyError: the optimizer needs all parameters at once, or an argument is invalid.
    """

    def __init__(
        self,
        kind: type[Optimizer],
        params: Iterable[Any],
        *,
        folder: str | os.PathLike[str] | None = None,
        block_bytes: int | str = 64 << 20,
        master_dtype: torch.dtype | None = None,
        checked: bool = False,
        **options: Any,
    ) -> None:
        given = list(params)
        self.kind, self.block_bytes = kind, nbytes("block_bytes", block_bytes)
        self._options, self._master_dtype = options, master_dtype
        self._folder, self._checked = None if folder is None else Path(folder), checked
        self._transfers: StateTransfers | None = None
        self._blocks: list[tuple[dict[str, Any], StateBlock]] = []
        self._num_split = 0
        super().__init__(given, check_separable(kind, given, options))

    @property
    def stored_bytes(self) -> int:
        """Bytes of states on the lower level."""
        return sum(block.stored_bytes for _, block in self._blocks)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps all blocks that have gradients; returns the result of `closure`.

        Raises:
            OffloadError: the storage is full or fails, or the host lacks memory.
            DisagreementError: at the first step, it failed on another rank.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._transfers is None and is_multi_rank() and trains_a_module(self):
            run_on_all_ranks(self._step_blocks)
        else:
            self._step_blocks()
        return loss

    def read_states(self) -> dict[torch.Tensor, dict[str, Any]]:
        """Copies of the states of all parameters; the inner optimizer's keys, and "master"."""
        found: dict[torch.Tensor, dict[str, Any]] = {}
        begun = [entry for entry in self._blocks if entry[1].shadows]
        for _, block in self._stream(begun, changes=False):
            found |= {p: block.state_of(index) for index, p in enumerate(block.parameters)}
        return {parameter: state for parameter, state in found.items() if state}

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state dict, read into memory."""
        placeholders, self.state = self.state, defaultdict(dict, self.read_states())
        try:
            return super().state_dict()
        finally:
            self.state = placeholders

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Writes a state to the lower level, also one that the inner optimizer saved by itself.

        Raises:
            ValueError: the state has other groups of parameters.
        """
        saved = state_dict["param_groups"]
        if [len(g["params"]) for g in saved] != [len(g["params"]) for g in self.param_groups]:
            raise ValueError("the state to load has other groups of parameters than this optimizer")
        states: dict[torch.Tensor, Mapping[str, Any]] = {}
        for group, other in zip(self.param_groups, saved, strict=True):
            group.update(hyperparameters(other))
            pairs = zip(group["params"], other["params"], strict=True)
            states |= {p: state_dict["state"].get(index, {}) for p, index in pairs}
        self._split_groups()
        for group, block in self._stream(self._blocks):
            block.load(hyperparameters(group), [states[p] for p in block.parameters])
        self._mark_states()

    def _step_blocks(self) -> None:
        self._split_groups()
        has_gradients = [
            entry for entry in self._blocks if any(p.grad is not None for p in entry[1].parameters)
        ]
        after: dict[int, dict[str, Any]] = {}
        for group, block in self._stream(has_gradients):
            stepped = block.step(hyperparameters(group))
            if after.setdefault(id(group), stepped) != stepped:
                raise StrategyError(
                    f"{self.kind.__name__} computes hyperparameters of a group from all its "
                    "parameters, and its blocks disagree: it cannot be stepped in blocks"
                )
        for group in self.param_groups:
            group.update(after.get(id(group), {}))
        self._mark_states()

    def _mark_states(self) -> None:
        """Shows by `state`, as torch does, which parameters have any."""
        kept = [p for _, block in self._blocks for p in block.parameters_with_state()]
        self.state = defaultdict(dict, {p: {"offloaded": True} for p in kept})

    def _split_groups(self) -> None:
        """Makes blocks of the parameters of new groups."""
        new = self.param_groups[self._num_split :]
        parts = [[p for p in group["params"] if not is_remote(p)] for group in new]
        if self._transfers is None:
            devices = (local_part(p).device for own in parts for p in own)
            device = next(devices, torch.device("cpu"))
            self._transfers = StateTransfers.between(device, self._folder, self._checked)
        for group, own in zip(new, parts, strict=True):
            for block in split_blocks([local_part(p).nbytes for p in own], self.block_bytes):
                parameters = [own[index] for index in block]
                self._blocks.append((group, StateBlock(parameters, self._master_dtype)))
        self._num_split = len(self.param_groups)

    def _make_inner(self, group: Mapping[str, Any], shadows: Sequence[nn.Parameter]) -> Optimizer:
        return self.kind([{**hyperparameters(group), "params": shadows}], **self._options)

    def _stream(
        self, entries: Sequence[tuple[dict[str, Any], StateBlock]], changes: bool = True
    ) -> Iterator[tuple[dict[str, Any], StateBlock]]:
        """Yields blocks with their states in memory; reads ahead, and writes `changes` behind."""
        transfers = self._transfers
        assert transfers is not None
        reads = deque(map(self._begin_read, (block for _, block in entries[:1])))
        for index, (group, block) in enumerate(entries):
            if index + 1 < len(entries):
                reads.append(self._begin_read(entries[index + 1][1]))
            finish = reads.popleft()
            memory = None if finish is None else finish()
            if memory is not None:
                block.attach(memory)
            block.begin(partial(self._make_inner, group))
            yield group, block
            if changes:
                self._write(block, memory)
            elif memory is not None:
                block.release()
                transfers.keep(memory)
        transfers.finish()

    def _begin_read(self, block: StateBlock) -> Callable[[], Tensor] | None:
        assert self._transfers is not None
        return None if block.place is None else self._transfers.begin_read(block.place)

    def _write(self, block: StateBlock, memory: Tensor | None) -> None:
        """Begins to write the states of a block, and frees their memory."""
        assert self._transfers is not None
        block.take_layout()
        if not block.stored_bytes and memory is None:
            return
        block.place, memory = self._transfers.room(block.place, block.stored_bytes, memory)
        block.detach(memory)
        self._transfers.begin_write(block.place, memory)
