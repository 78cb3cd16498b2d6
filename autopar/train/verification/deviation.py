"""`Verification`: deviations of training under a plan from the plain model, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autopar.core.common.tolerances import differences, real_numbers
from autopar.runtime.agreement.consensus import gather_objects, is_multi_rank

KINDS = ("loss", "gradient", "parameter", "buffer")
"""Kinds of tensors in the order of a step."""

LEFT_OUT = (
    "elements whose gradients are mere rounding, which AdamW turns into whole steps, were not "
    "compared after those steps: some of {names}"
)


@dataclass(frozen=True)
class Deviation:
    """Deviation of one tensor under a plan from the plain model's.

    Attributes:
        kind: one of `KINDS`.
        name: name of the parameter or buffer; "" for the loss.
        error: norm of the difference over the norm of the plain tensor, or over a floor if that
            norm is mere rounding; infinite if only one model has the tensor.
        index: index of the element that differs most; () for a scalar.
    """

    kind: str
    name: str = ""
    error: float = 0.0
    step: int = 1
    index: tuple[int, ...] = ()

    def __str__(self) -> str:
        named = f"{self.kind} of {self.name}" if self.kind == "gradient" else self.kind
        named = f"{self.kind} {self.name}" if self.kind in ("parameter", "buffer") else named
        if math.isinf(self.error):
            return f"{named}: only one side has it, or one is not finite, in step {self.step}"
        at = f" at {list(self.index)}" if self.index else ""
        return f"{named} differs by {self.error:.1e}{at} in step {self.step}"


@dataclass(frozen=True)
class Verification:
    """Comparison of training steps under a plan with the plain model on one process.

    Attributes:
        loss: worst deviation of a step's loss; None for a script, which has the loss to itself.
        gradient: worst deviation of a gradient.
        parameter: worst deviation of a parameter after the optimizer's step.
        buffer: worst deviation of a buffer; None if the model has none.
        tolerance: relative difference that passes.
        dtype: least precise dtype of the plain model.
        first: first deviation beyond the tolerance, a possible cause of later ones; None on PASS.
        draws: random operators replaced by constants in both trainings.
        notes: limits of the comparison.
    """

    loss: Deviation | None
    gradient: Deviation
    parameter: Deviation
    buffer: Deviation | None
    tolerance: float
    dtype: torch.dtype
    steps: int
    ranks: int
    first: Deviation | None = None
    draws: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def deviations(self) -> tuple[Deviation, ...]:
        found = self.loss, self.gradient, self.parameter, self.buffer
        return tuple(deviation for deviation in found if deviation is not None)

    @property
    def worst(self) -> Deviation:
        return max(self.deviations, key=lambda deviation: deviation.error)

    @property
    def passed(self) -> bool:
        return self.worst.error <= self.tolerance

    def to_dict(self) -> dict[str, Any]:
        """Values that JSON can store; an infinite error is None."""
        return {
            "passed": self.passed,
            "tolerance": self.tolerance,
            "dtype": str(self.dtype).removeprefix("torch."),
            "steps": self.steps,
            "ranks": self.ranks,
            **{d.kind: d.error if math.isfinite(d.error) else None for d in self.deviations},
            "worst": str(self.worst),
            "first": None if self.first is None else str(self.first),
            "constant_draws": list(self.draws),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        same = "are those of the plain model" if self.passed else "are not those of the plain model"
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        each = ", ".join(f"{d.kind} {d.error:.1e}" for d in self.deviations)
        lines = [
            f"{'PASS' if self.passed else 'FAIL'}: {steps} on {ranks} {same} "
            f"(tolerance {self.tolerance:.0e}, {str(self.dtype)[6:]})",
            f"worst: {self.worst}",
            *([f"first: {self.first}"] if self.first not in (None, self.worst) else []),
            f"by kind: {each}{'' if self.buffer else ', no buffers'}",
        ]
        if self.draws:
            lines.append(f"random numbers were constants on both sides: {', '.join(self.draws)}")
        return "\n".join([*lines, *self.notes])


@dataclass
class Comparison:
    """Worst deviations so far of this rank's tensors.

    Attributes:
        tolerance: relative difference that passes.
        eps: machine epsilon of the dtype, for the floor of norms.
        first: earliest deviation beyond the tolerance.
        missing: names of tensors that this rank does not have, by kind and step.
        rounding: elements of a parameter whose gradients were mere rounding in some step, by name.
        left_out: names of the parameters whose such elements were not compared.
    """

    tolerance: float
    eps: float
    worst: dict[str, Deviation] = field(default_factory=dict)
    first: Deviation | None = None
    missing: dict[tuple[str, int], set[str]] = field(default_factory=dict)
    rounding: dict[str, Tensor] = field(default_factory=dict)
    left_out: set[str] = field(default_factory=set)

    def add(
        self, kind: str, step: int, actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]
    ) -> None:
        floats = [value for value in expected.values() if value.is_floating_point()]
        largest = max(map(_norm, floats), default=0.0)
        # Below this norm relative to the largest, a tensor is mere rounding. Optimizers that
        # normalize gradients amplify rounding, so parameters have a larger floor.
        rounding = 0.1 if kind == "parameter" else min(1.0, 10 * self.eps / self.tolerance)
        floor = rounding * (max(largest, 1.0) if kind == "loss" else largest)
        self.missing[kind, step] = set(expected) - set(actual)
        for name, value in actual.items():
            error: float = math.inf
            index: tuple[int, ...] = ()
            if name in expected:
                error, index = _difference(value, expected[name], floor)
                if kind == "parameter" and self.tolerance < error and name in self.rounding:
                    error, index = _difference(value, expected[name], floor, self.rounding[name])
                    self.left_out.add(name)
                if kind == "gradient" and error <= self.tolerance:
                    self._note_rounding(name, value, expected[name], largest, floor)
            self._record(Deviation(kind, name, error, step, index))

    def _note_rounding(
        self, name: str, actual: Tensor, expected: Tensor, largest: float, floor: float
    ) -> None:
        """Keeps the elements that differ by rounding, in a gradient that agrees as a whole.

        AdamW divides a gradient by its size. So it turns the rounding of an element whose true
        gradient is zero, such as that of a key's bias, into a step of full length.
        """
        difference, norm = differences(actual, expected).abs(), _norm(expected)
        # Terms that cancel to a gradient of mere rounding are as large as other gradients.
        rounding = 10 * self.eps * (norm if norm > floor else largest)
        noisy = difference > self.tolerance * real_numbers(expected).abs()
        noisy &= difference <= rounding
        if noisy.any():
            before = self.rounding.get(name)
            self.rounding[name] = noisy if before is None else before | noisy

    def everywhere(self) -> dict[str, Deviation]:
        """The worst deviation of each kind over all ranks; all ranks call this at once."""
        deviations = [*self.worst.values(), *([self.first] if self.first else [])]
        local = deviations, self.missing, self.left_out
        found = gather_objects(local) if is_multi_rank() else [local]
        for deviations, _, left_out in found:
            self.left_out |= left_out
            for deviation in deviations:
                self._record(deviation)
        for (kind, step), names in self.missing.items():
            # A pipeline rank lacks the tensors of other stages: only what no rank has is missing.
            nowhere = names.intersection(*(missing[kind, step] for _, missing, _ in found))
            for name in sorted(nowhere):
                self._record(Deviation(kind, name, math.inf, step))
        return self.worst

    @property
    def notes(self) -> tuple[str, ...]:
        """Names of what was left out, in words."""
        names = ", ".join(sorted(self.left_out))
        return (LEFT_OUT.format(names=names),) if names else ()

    def _record(self, deviation: Deviation) -> None:
        known = self.worst.get(deviation.kind)
        if known is None or deviation.error > known.error:
            self.worst[deviation.kind] = deviation
        if deviation.error > self.tolerance:
            self.first = min(self.first or deviation, deviation, key=_order)


def _order(deviation: Deviation) -> tuple[int, int, float]:
    """Sort key: step and kind, then the largest error first."""
    return deviation.step, KINDS.index(deviation.kind), -deviation.error


def _difference(
    actual: Tensor, expected: Tensor, floor: float, left_out: Tensor | None = None
) -> tuple[float, tuple[int, ...]]:
    """Norm of the difference over that of `expected`, and where they differ most.

    Elements of the mask `left_out` do not count.
    """
    if actual.shape != expected.shape:
        return math.inf, ()
    difference = differences(actual, expected).abs()
    if left_out is not None:
        difference = difference.masked_fill(left_out, 0.0)
    worst = difference.max().item() if difference.numel() else 0.0
    if worst == 0.0:
        return 0.0, ()
    largest = difference.nan_to_num(math.inf).argmax()
    index = tuple(int(i) for i in torch.unravel_index(largest, difference.shape))
    scale = max(_norm(expected), floor)
    norm = difference.norm().item()
    error = norm / scale if scale > 0 else norm
    return (error if math.isfinite(error) else math.inf), index


def _norm(tensor: Tensor) -> float:
    norm = tensor.detach().double().norm().item()
    return norm if math.isfinite(norm) else 0.0
