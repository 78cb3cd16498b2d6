"""Roles: the meaning of every input and output of a `TrainingGraph`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Parameter:
    """Input: the parameter `name`, as it lies between steps."""

    name: str


@dataclass(frozen=True)
class Buffer:
    """Input: the buffer `name`."""

    name: str


@dataclass(frozen=True)
class Input:
    """Input: the `index`-th tensor among the flattened arguments of the call."""

    index: int


@dataclass(frozen=True)
class Tangent:
    """Input: the gradient of the loss by the `index`-th flattened output."""

    index: int


@dataclass(frozen=True)
class BatchFraction:
    """Input: float64 scalar, rows of this rank over rows of the global batch."""


@dataclass(frozen=True)
class BatchIndex:
    """Input: int64 vector, the place of this rank's slice of the batch.

    One number, the slice's own, where all slices have as many rows; else the numbers of its rows.
    """


@dataclass(frozen=True)
class BatchChecksum:
    """Input: float64 vector that the ranks of an axis add up to find out whether they agree.

    Attributes:
        axis: its name, or several; "" for the axis of the data.
    """

    axis: str = ""


@dataclass(frozen=True)
class Accumulated:
    """Input: the gradient of parameter `name` from earlier steps or micro-batches.

    Attributes:
        name: of the parameter.
        reduced: whether it lies as the parameter does; otherwise it is this rank's own part.
    """

    name: str
    reduced: bool = False


@dataclass(frozen=True)
class State:
    """Input of the backward: what compression keeps from one step to the next; written in place.

    Attributes:
        kind: "residual": of this rank's gradient, what was not sent yet; "factor": the last right
            factor of PowerSGD; "count": how often random places were drawn.
        name: of the parameter, of the first of a bucket for a count.
    """

    kind: str
    name: str


@dataclass(frozen=True)
class UnshardedParam:
    """Output of the first forward of a step, input of those behind: parameter `name`, gathered."""

    name: str


@dataclass(frozen=True)
class StageInput:
    """Input of a stage: a value of another stage, by its number; it comes in a phase."""

    value: int
    phase: str


@dataclass(frozen=True)
class BatchTotal:
    """Input: a sum over the batch, of the parts of all micro-batches and ranks.

    Attributes:
        index: which.
        late: whether it is known only when all forwards have run.
    """

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


@dataclass(frozen=True)
class Update:
    """Output: the new value of a buffer, or of an input or state that is changed in place."""

    of: Buffer | Input | State


@dataclass(frozen=True)
class ChecksumSum:
    """Output: the sum over the ranks of an axis, or of several, of `BatchChecksum`."""

    axis: str = ""


@dataclass(frozen=True)
class UnreducedGrad:
    """Output: this rank's gradient of parameter `name`, not reduced (`no_sync`)."""

    name: str


@dataclass(frozen=True)
class Saved:
    """Output of the forward and input of the backward: the value of node `name`."""

    name: str


@dataclass(frozen=True)
class StageOutput:
    """Output of a stage: a value that another stage receives, by its number."""

    value: int
    phase: str


@dataclass(frozen=True)
class MicrobatchPartial:
    """Output: what a micro-batch adds to the `BatchTotal` of this index."""

    index: int


InputRole = (
    Parameter
    | Buffer
    | Input
    | Tangent
    | BatchFraction
    | BatchIndex
    | BatchChecksum
    | Accumulated
    | State
    | Saved
    | UnshardedParam
    | StageInput
    | BatchTotal
)


OutputRole = (
    Output
    | Gradient
    | Update
    | ChecksumSum
    | UnreducedGrad
    | Saved
    | UnshardedParam
    | StageOutput
    | MicrobatchPartial
)


Differentiable = Parameter | Input
