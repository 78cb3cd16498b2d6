"""Roles: the meaning of every input and output of a `TrainingGraph`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Parameter:
    """Input: the parameter `name`, as stored between steps."""

    name: str


@dataclass(frozen=True)
class Buffer:
    """Input: the buffer `name`."""

    name: str


@dataclass(frozen=True)
class Input:
    """Input: the `index`-th tensor of the flattened arguments of the call."""

    index: int


@dataclass(frozen=True)
class Tangent:
    """Input: the gradient of the loss with respect to the `index`-th flattened output."""

    index: int


@dataclass(frozen=True)
class BatchFraction:
    """Input: rows of this rank divided by rows of the global batch, a float64 scalar."""


@dataclass(frozen=True)
class BatchIndex:
    """Input: position of this slice in the batch, an int64 vector.

    It holds the index of the slice if slices are even, otherwise the indices of its rows.
    """


@dataclass(frozen=True)
class Accumulated:
    """Input: the gradient of parameter `name` from earlier steps or micro-batches.

    If `reduced`, it is reduced and placed like the parameter; if not, it is a partial sum.
    """

    name: str
    reduced: bool = False


@dataclass(frozen=True)
class State:
    """Input of the backward: compression state of a parameter, updated in place at every step.

    Kinds are "residual", the unsent part of this rank's gradient; "factor", the last right factor
    of PowerSGD; and "count", the number of draws of random indices for the bucket that begins here.
    """

    kind: str
    name: str


@dataclass(frozen=True)
class UnshardedParam:
    """Output of the first forward of a step, input of later ones: parameter `name`, gathered."""

    name: str


@dataclass(frozen=True)
class StageInput:
    """Input of a stage: the value with this number, received from another stage in a phase."""

    value: int
    phase: str


@dataclass(frozen=True)
class BatchTotal:
    """Input: a sum over all micro-batches and ranks; if `late`, known only after all forwards."""

    index: int
    late: bool


@dataclass(frozen=True)
class Output:
    """Output: the `index`-th flattened output of the model."""

    index: int


@dataclass(frozen=True)
class Gradient:
    """Output: the gradient of an input or parameter."""

    of: Parameter | Input

    @property
    def key(self) -> str | int:
        """The name of the parameter, or the index of the input."""
        return self.of.name if isinstance(self.of, Parameter) else self.of.index


@dataclass(frozen=True)
class Update:
    """Output: the new value of a buffer, input or state that is changed in place."""

    of: Buffer | Input | State


@dataclass(frozen=True)
class UnreducedGrad:
    """Output: this rank's unreduced gradient of parameter `name` (`no_sync`)."""

    name: str


@dataclass(frozen=True)
class Saved:
    """Output of the forward and input of the backward: the value of node `name`."""

    name: str


@dataclass(frozen=True)
class StageOutput:
    """Output of a stage: the value with this number, for another stage."""

    value: int
    phase: str


@dataclass(frozen=True)
class MicrobatchPartial:
    """Output: the contribution of a micro-batch to the `BatchTotal` with this index."""

    index: int


_OfCall = Parameter | Buffer | Input | Tangent
_OfBatch = BatchFraction | BatchIndex | BatchTotal
_Passed = Saved | UnshardedParam  # from one graph to another

InputRole = _OfCall | _OfBatch | Accumulated | State | StageInput | _Passed
_OfStage = StageOutput | MicrobatchPartial
OutputRole = Output | Gradient | Update | UnreducedGrad | _OfStage | _Passed
Differentiable = Parameter | Input
