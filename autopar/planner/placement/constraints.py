"""`resolve_constraints`: parameter placements that the user requires along an axis."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase

from autopar.core.ir.graph import ParameterInfo
from autopar.core.ir.placement import Placement, Replicate, Shard, can_cut
from autopar.errors import StrategyError


def resolve_constraints(
    pins: Mapping[str, Placement], parameters: Mapping[str, ParameterInfo], ranks: int
) -> dict[str, Placement]:
    """Placements by parameter name, from placements by `fnmatch` pattern; the last match wins.

    Raises:
        StrategyError: A pattern matches no parameter, or a placement is impossible.
    """
    found: dict[str, Placement] = {}
    for pattern, placement in pins.items():
        names = [name for name in parameters if fnmatchcase(name, pattern)]
        if not names:
            near = get_close_matches(pattern, parameters, 3, 0.0)
            raise StrategyError(
                f"placements names {pattern!r}, which no parameter is called: there are "
                f"{', '.join(near)}, ..."
            )
        for name in names:
            found[name] = _checked(pattern, placement, parameters[name], ranks)
    return found


def _checked(pattern: str, placement: Placement, parameter: ParameterInfo, ranks: int) -> Placement:
    """The placement, with a nonnegative dim; raises StrategyError if it is impossible."""

    def refuse(why: str) -> StrategyError:
        shape = list(parameter.shape)
        return StrategyError(
            f"placements={{{pattern!r}: {placement}}} cannot hold for {parameter.name} {shape} "
            f"over {ranks} ranks: {why}. Choose another dim, or Replicate()."
        )

    if isinstance(placement, Replicate):
        return placement
    if not isinstance(placement, Shard):
        raise refuse("a parameter is sharded or replicated")
    if not -len(parameter.shape) <= placement.dim < len(parameter.shape):
        raise refuse(f"it has {len(parameter.shape)} dims")
    dim = placement.dim % len(parameter.shape)
    size, pieces = parameter.shape[dim], placement.interleave
    if pieces < 1 or not can_cut(size, ranks, pieces):
        if pieces == 1:
            raise refuse(f"dim {dim} of {size} leaves nothing for the last of them")
        raise refuse(f"dim {dim} of {size} does not divide into {pieces} pieces of {ranks} chunks")
    return Shard(dim, pieces)
