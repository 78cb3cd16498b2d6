"""Elements of loops beside forward, backward and step, of each group at most one a loop."""

from collections.abc import Mapping

from benchmarks.loops.elements import (
    accumulation,
    derivatives,
    gradients,
    parameters,
    state,
    surroundings,
)
from benchmarks.loops.loop import Element

GROUPS: Mapping[str, Mapping[str, type[Element]]] = {
    "accumulation": accumulation.ELEMENTS,
    "gradients": gradients.ELEMENTS,
    "parameters": parameters.ELEMENTS,
    "state": state.ELEMENTS,
    "surroundings": surroundings.ELEMENTS,
    "derivatives": derivatives.ELEMENTS,
}

ELEMENTS: Mapping[str, type[Element]] = {
    name: element for group in GROUPS.values() for name, element in group.items()
}
