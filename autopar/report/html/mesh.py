"""Section on the mesh: axes, ranks and their parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod

from autopar.formatting import human_bytes
from autopar.ir.mesh_levels import DATA_AXIS, DATA_STORAGE_AXES
from autopar.ir.placement import Placement, Shard
from autopar.plan.layout import Layout
from autopar.plan.pipeline import Pipeline
from autopar.plan.spec import PlanSpec
from autopar.plan.strategy import MESH
from autopar.report.html.figures import count, size
from autopar.report.html.markup import Markup, section, table, tag

_MOST = 32  # maximum number of drawn ranks
_WIDE, _TALL = 120, 36  # size of a rank's bar in SVG units
_DOES = {
    "pp": "stages of the model, one after the other",
    "dp": "rows of the batch",
    "cp": "activations inside of the model; parameters are whole",
    "tp": "operators and their parameters",
    "ep": "operators and their parameters, among neighbours",
}


@dataclass(frozen=True)
class Portion:
    """Parameters of one stage with the same placement along each axis of `Layout.storage`."""

    stage: int
    layout: tuple[tuple[str, Placement], ...]
    nbytes: int

    def interval(self, place: Mapping[str, int], sizes: Mapping[str, int]) -> tuple[float, float]:
        """Interval of [0, 1] that a rank stores, with all parameters as one flat tensor."""
        low, span = 0.0, 1.0
        for axis, placement in self.layout:
            if isinstance(placement, Shard):
                span /= sizes[axis]
                low += span * place[axis]
        return low, low + span


def mesh(plan: PlanSpec) -> Markup:
    """Renders the section."""
    portions = portions_of(plan)
    axes = tuple((axis, ranks) for axis, ranks in plan.mesh if ranks > 1) or plan.mesh[-1:]
    shown = _shown(axes)
    drawn = prod(len(places) for places in shown.values())
    lead = (
        "Each field is a rank, its bar the whole model: from left to right stages and kinds of "
        "parameters, as wide as they are large; filled is what the rank holds between steps."
    )
    if drawn < plan.world_size:
        lead += f" {drawn} of {plan.world_size} ranks are drawn, the others are like them."
    return section(
        "mesh",
        "The mesh, and what each rank holds",
        _axes(plan),
        tag("p", lead, class_="lead"),
        tag("div", *_level(plan, portions, shown, {}), class_="mesh"),
    )


def portions_of(plan: PlanSpec) -> tuple[Portion, ...]:
    """Parameters grouped by stage and layout, in the order of stages."""
    owners = plan.pipeline.owners if plan.pipeline else {}

    def key(name: str) -> tuple[int, str]:
        return owners.get(name, 0), str(Layout(plan).of(name))

    sizes = dict(plan.parameter_bytes)
    found = []
    for (stage, _), names in groupby(sorted(sizes, key=key), key=key):
        own = list(names)
        layout = tuple(Layout(plan).of(own[0]).items())
        found.append(Portion(stage, layout, sum(sizes[name] for name in own)))
    return tuple(found)


def held_bytes(plan: PlanSpec, portions: Iterable[Portion], rank: int) -> float:
    """Bytes of parameters that a rank stores between steps."""
    return sum(portion.nbytes * (high - low) for portion, low, high in _held(plan, portions, rank))


def stored(plan: PlanSpec, rank: int) -> dict[str, int]:
    """Coordinate of a rank on each axis of `Layout.storage`."""
    layout = Layout(plan)
    sizes, found = dict(layout.storage), {}
    for axis, at in layout.coordinate(rank).items():
        if axis in sizes:
            found[axis] = at
        else:
            outer, inner = DATA_STORAGE_AXES
            found[outer], found[inner] = divmod(at, sizes[inner])
    return found


def _held(
    plan: PlanSpec, portions: Iterable[Portion], rank: int
) -> Iterator[tuple[Portion, float, float]]:
    """Portions of the stages that a rank runs, and the rank's interval of each."""
    place, sizes = stored(plan, rank), dict(Layout(plan).storage)
    stages = plan.pipeline.stages_of(place.get("pp", 0)) if plan.pipeline else None
    for portion in portions:
        if stages is None or portion.stage in stages:
            yield portion, *portion.interval(place, sizes)


def _axes(plan: PlanSpec) -> Markup:
    rows: list[tuple[object, ...]] = []
    for axis, ranks in plan.mesh:
        divides = _DOES.get(axis, "")
        stages = sorted({stage for _, stage in plan.zero_stages if stage})
        if axis == DATA_AXIS and stages and plan.dp_size > 1:
            divides += f"; parameters in shards: ZeRO {', '.join(map(str, stages))}"
        over = sum(n for name, n in plan.sent_bytes if name.partition(".")[0] == axis)
        rows.append((axis, count(ranks), divides, size(over)))
    headings = ("axis", "ranks >", "divides", "a rank sends a step >")
    return table(headings, rows, "Axes of the mesh, the last one among neighbours")


def _shown(axes: Sequence[tuple[str, int]]) -> dict[str, list[int]]:
    """Coordinates drawn on each axis: the first ones and the last one.

    Data-parallel coordinates are omitted first and pipeline coordinates last, because data-parallel
    ranks are the most similar.
    """
    numbers = dict(axes)
    for axis in sorted(numbers, key=lambda axis: (axis == "pp", axis in MESH)):
        beside = prod(numbers.values()) // numbers[axis]
        numbers[axis] = min(numbers[axis], max(2, _MOST // beside))
    return {
        axis: [*range(numbers[axis] - 1), size - 1] if numbers[axis] < size else list(range(size))
        for axis, size in axes
    }


def _level(
    plan: PlanSpec,
    portions: Sequence[Portion],
    shown: Mapping[str, list[int]],
    outer: dict[str, int],
) -> Iterator[Markup]:
    """Groups of ranks along the outermost axis that `outer` lacks, with nested inner axes."""
    axis, *inner = [axis for axis in shown if axis not in outer]
    before = -1
    for at in shown[axis]:
        if at != before + 1:
            yield tag("p", f"… {at - before - 1} more", class_="gap")
        before, own = at, outer | {axis: at}
        if not inner:
            yield _rank(plan, portions, own, f"{axis} {at}")
            continue
        stages = _stage_names(plan.pipeline, at) if axis == "pp" and plan.pipeline else ""
        caption = tag("p", f"{axis} {at}", tag("small", stages))
        parts = tag("div", *_level(plan, portions, shown, own), class_="ranks")
        yield tag("div", caption, parts, class_="group")


def _stage_names(pipeline: Pipeline, rank: int) -> str:
    """First parameter of each stage of a pipeline rank."""
    found = []
    for stage in pipeline.stages_of(rank):
        owners = pipeline.owners.items()
        first = next((name for name, owner in owners if owner == stage), "nothing")
        found.append(f"stage {stage} from {first}")
    return "; ".join(found)


def _rank(
    plan: PlanSpec, portions: Sequence[Portion], place: Mapping[str, int], where: str
) -> Markup:
    """One rank, with a bar of the model that is filled with the rank's part."""
    number = 0
    for axis, ranks in plan.mesh:
        number = number * ranks + place.get(axis, 0)
    own = {portion: interval for portion, *interval in _held(plan, portions, number)}
    whole, x, path = sum(p.nbytes for p in portions), 0.0, []
    for portion in portions:
        wide = portion.nbytes / (whole or 1) * _WIDE
        if portion in own:
            low, high = own[portion]
            y, tall = low * _TALL, max(1.0, (high - low) * _TALL)
            path.append(f"M{x:.4g} {y:.4g}h{wide:.4g}v{tall:.4g}h-{wide:.4g}z")
        x += wide
    held = held_bytes(plan, portions, number)
    said = f"rank {number} holds {human_bytes(held)} of {human_bytes(whole)} of parameters"
    bar = tag(
        "svg",
        tag("title", said),
        tag("rect", width=_WIDE, height=_TALL, class_="whole"),
        tag("path", d="".join(path), class_="held"),
        viewbox=f"0 0 {_WIDE} {_TALL}",
        role="img",
        preserveaspectratio="none",
    )
    small = tag("small", where), bar, tag("small", size(held))
    return tag("div", tag("b", f"rank {number}"), *small, class_="rank")
