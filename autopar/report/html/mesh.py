"""Section on the mesh: its ranks as one coloured grid, its axes, and its stages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod

from autopar.core.ir.mesh_levels import DATA_AXIS, DATA_STORAGE_AXES
from autopar.core.ir.placement import Placement, Shard
from autopar.core.plan.layout import Layout
from autopar.core.plan.pipeline import Pipeline
from autopar.core.plan.plan import Plan
from autopar.core.plan.strategy import MESH
from autopar.report.html.figures import count, size
from autopar.report.html.markup import Markup, legend, section, table, tag

MOST_RANKS = 1024
"""Maximum number of drawn ranks."""

_COLUMNS, _HUES, _SHADES = 32, 12, 8  # maximum number of columns, of colours, and of their shades
_CELL, _GAP, _APART = 10, 1, 3  # size of a field, and gaps between fields and nodes, in SVG units
_DOES = {
    "pp": "the model into stages, one after the other",
    "dp": "the rows of the batch",
    "cp": "activations; parameters are whole",
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


def mesh(plan: Plan) -> Markup:
    """Renders the section."""
    shown = drawn_ranks(plan)
    return section(
        "mesh",
        "Mesh",
        tag("p", *_says(plan, len(shown)), class_="lead"),
        *_grid(plan, shown),
        _axes(plan),
        _stages(plan.pipeline) if plan.pipeline and plan.pipeline.stages > 1 else None,
    )


def drawn_ranks(plan: Plan) -> list[int]:
    """All ranks, or of more than MOST_RANKS those of the first data-parallel ranks."""
    beside = plan.world_size // max(1, plan.dp_size)
    most = max(1, MOST_RANKS // beside)
    place = Layout(plan).coordinate
    return [r for r in range(plan.world_size) if place(r).get(DATA_AXIS, 0) < most]


def _says(plan: Plan, drawn: int) -> Iterator[str]:
    yield "Each field is a rank, gaps separate nodes. "
    if _parts(plan) > 1:
        yield "Ranks of one colour compute the same part of the model, each on rows of its own. "
    else:
        yield "Every rank computes the whole model, on rows of its own. "
    if _shards(plan) > 1:
        yield "Shades are its shards: what ZeRO divides among them. "
    if drawn < plan.world_size:
        yield f"{drawn:,} of {plan.world_size:,} ranks are drawn; further rows are like them. "


def portions_of(plan: Plan) -> tuple[Portion, ...]:
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


def held_bytes(plan: Plan, portions: Iterable[Portion], rank: int) -> float:
    """Bytes of parameters that a rank stores between steps."""
    return sum(portion.nbytes * (high - low) for portion, low, high in _held(plan, portions, rank))


def stored(plan: Plan, rank: int) -> dict[str, int]:
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
    plan: Plan, portions: Iterable[Portion], rank: int
) -> Iterator[tuple[Portion, float, float]]:
    """Portions of the stages that a rank runs, and the rank's interval of each."""
    place, sizes = stored(plan, rank), dict(Layout(plan).storage)
    stages = plan.pipeline.stages_of(place.get("pp", 0)) if plan.pipeline else None
    for portion in portions:
        if stages is None or portion.stage in stages:
            yield portion, *portion.interval(place, sizes)


def _axes(plan: Plan) -> Markup:
    rows: list[tuple[object, ...]] = []
    zeroed = [partition.axis for partition in plan.partitions if partition.zero]
    for axis, ranks in plan.mesh:
        divides = _DOES.get(axis, "")
        stages = sorted({stage for _, stage in plan.zero_stages if stage})
        if axis in (DATA_AXIS, *zeroed) and stages and ranks > 1:
            divides += f"; parameters in shards: ZeRO {', '.join(map(str, stages))}"
        over = sum(n for name, n in plan.sent_bytes if name.partition(".")[0] == axis)
        rows.append((axis, count(ranks), divides, size(over)))
    headings = ("axis", "ranks >", "divides", "a rank sends a step >")
    sent = sum(nbytes for _, nbytes in plan.sent_bytes)
    total = ("total", count(plan.world_size), "", size(sent))
    return table(headings, rows, "Axes of the mesh, the last one among neighbours", total)


def _part(plan: Plan, rank: int) -> tuple[tuple[str, int], ...]:
    """Coordinates of a rank on the axes that divide the model."""
    place, sizes = Layout(plan).coordinate(rank), dict(plan.mesh)
    return tuple((a, place[a]) for a in sizes if a in ("pp", *MESH) and sizes[a] > 1)


def _parts(plan: Plan) -> int:
    return prod(ranks for axis, ranks in plan.mesh if axis in ("pp", *MESH))


def _shards(plan: Plan) -> int:
    """Number of data-parallel ranks that ZeRO shards over."""
    if not any(stage for _, stage in plan.zero_stages):
        return 1
    return dict(Layout(plan).storage).get(DATA_STORAGE_AXES[1], plan.dp_size)


def _grid(plan: Plan, ranks: Sequence[int]) -> Iterator[Markup]:
    """The picture, its data for the page's script, and its legend."""
    p = plan.prediction
    node = (p.report_data.ranks_per_node if p is not None else 0) or len(ranks)
    columns = _columns(len(ranks), node)
    parts = list(dict.fromkeys(_part(plan, rank) for rank in ranks))
    hues, shards = {part: i % _HUES for i, part in enumerate(parts)}, _shards(plan)
    paths: dict[tuple[int, int], list[str]] = {}
    for at, rank in enumerate(ranks):
        shard = Layout(plan).coordinate(rank).get(DATA_AXIS, 0) % shards
        key = hues[_part(plan, rank)], shard * _SHADES // shards
        x, y = _left(at % columns, node), at // columns * (_CELL + _GAP)
        paths.setdefault(key, []).append(f"M{x} {y}h{_CELL}v{_CELL}h-{_CELL}z")
    width, height = _left(columns, node), -(-len(ranks) // columns) * (_CELL + _GAP)
    fields = (
        tag("path", d="".join(own), class_=f"h{hue}", fill_opacity=1 - shade * 0.08)
        for (hue, shade), own in paths.items()
    )
    names = [" × ".join(f"{axis} {at}" for axis, at in part) for part in parts]
    yield tag(
        "svg",
        *fields,
        viewbox=f"0 0 {width} {height}",
        style=f"max-width:{min(44, 2.8 * columns):g}rem",
        class_="grid-of-ranks",
        role="img",
        aria_label=f"{len(ranks)} ranks, {len(parts)} parts of the model",
    )
    portions = portions_of(plan)
    data = {
        "columns": columns,
        "node": node,
        "cell": [_CELL, _GAP, _APART],
        "ranks": ranks,
        "mesh": plan.mesh,
        "held": [round(held_bytes(plan, portions, rank)) for rank in ranks],
    }
    yield tag("script", Markup(json.dumps(data)), type="application/json", id="ranks")
    if len(parts) > 1:
        rest = len(parts) - _HUES
        more = [("", f"and {rest} more, in the same colours")] if rest > 0 else []
        yield legend([*((f"h{i}", name) for i, name in enumerate(names[:_HUES])), *more])


def _columns(ranks: int, node: int) -> int:
    """Whole nodes in a row, as many as divide the ranks evenly."""
    fitting = [n for n in range(node, _COLUMNS + 1, node) if ranks % n == 0]
    return max(fitting, default=min(ranks, _COLUMNS))


def _left(column: int, node: int) -> int:
    return column * (_CELL + _GAP) + column // node * _APART


def _stages(pipeline: Pipeline) -> Markup:
    """Table of the first parameter of each stage."""
    first: dict[int, str] = {}
    for name, stage in pipeline.owners.items():
        first.setdefault(stage, name)
    rows = [
        (f"rank {rank}", str(stage), tag("code", first.get(stage, "no parameter")))
        for rank in range(pipeline.ranks)
        for stage in pipeline.stages_of(rank)
    ]
    return table(("pipeline rank", "stage", "from"), rows, "Stages of the pipeline")
