"""`Options`: options of a module's captures and calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from autopar.capture.stated_rows import StatedRows
from autopar.runtime.codegen.recorder import Recorder

Batch = Literal["global", "local"]
Outputs = Literal["whole", "own"]

MAX_PROGRAMS = 64
"""Programs that a module keeps by default."""


@dataclass(frozen=True)
class Options:
    """Options of a module's captures and calls.

    Attributes:
        loss_fn: computes the loss inside the graph.
        model_parallel_size: number of ranks that one stage is partitioned over.
        pp_size: number of ranks along the pipeline.
        local: whether each rank computes as on its rows alone (`batch_semantics`).
        ragged: whether ranks bring tensors of other sizes, such as packed rows of other lengths.
        max_programs: number of programs to keep.
        cuda_graphs: whether programs are replayed as CUDA graphs.
        static: keyword arguments whose values forward reads in Python.
        row_shares: share of the batch's rows of each data-parallel rank; () for equal ones.
        groups: number of groups of ranks that step apart.
        group: this rank's group.
        outputs: "whole" if results have all rows under batch="global", "own" for this rank's.
        rows: dims of arguments that the user says are rows.
        undivided: numbers of rows of batches that every rank computes whole.
        on_trial: whether the module is a copy that tries a plan, without warnings.
    """

    batch: Batch = "global"
    loss_fn: Callable[..., Any] | None = None
    precision: torch.dtype | None = None
    backend: str = "eager"
    ranks: int = 1
    model_parallel_size: int = 1
    pp_size: int = 1
    recorder: Recorder | None = None
    local: bool = False
    ragged: bool = False
    max_programs: int = MAX_PROGRAMS
    cuda_graphs: bool = False
    static: tuple[str, ...] = ()
    row_shares: tuple[float, ...] = ()
    groups: int = 1
    group: int = 0
    outputs: Outputs = "whole"
    rows: StatedRows | None = None
    undivided: frozenset[int] = frozenset()
    on_trial: bool = False

    @property
    def is_replicated(self) -> bool:
        """Whether values of all rows cross the border of the module."""
        return self.batch == "global" and self.outputs == "whole" and self.groups == 1

    def dp_rank(self, rank: int) -> int:
        return rank // self.model_parallel_size % self.dp_size

    @property
    def dp_size(self) -> int:
        """Number of ranks that the rows of a batch are split over."""
        return self.ranks // self.model_parallel_peers

    @property
    def model_parallel_peers(self) -> int:
        """Number of ranks with the same rows."""
        return self.model_parallel_size * self.pp_size
