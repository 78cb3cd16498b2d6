"""`upgrade_schema_6`: converts plan documents of schema 6 to schema 7."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from autopar.core.ir.mesh_levels import DATA_AXIS, DATA_STORAGE_AXES, INTER_NODE, INTRA_NODE

SCHEMA_VERSION = 7

_LEVELS = {"within": INTRA_NODE, "between": INTER_NODE}


def upgrade_schema_6(document: Mapping[str, Any]) -> dict[str, Any]:
    """Renames the fields and axes of a document of schema 6, without checking it.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: The document is not a plan of schema 6.
    """
    plan = _rename(document, "stages", "zero_stages")
    plan |= {"schema_version": 7, "comm_backend": "gloo"}
    plan["mesh"] = _rename_axes(plan["mesh"])
    plan["sent_bytes"] = _rename_axes(plan["sent_bytes"])
    plan["levels"] = [
        _with_axis(_rename(levels, "within", "intra_node")) for levels in plan["levels"]
    ]
    plan["partitions"] = [_rename(each, "ways", "strategies") for each in plan["partitions"]]
    if plan["prediction"] is not None:
        prediction = _rename(plan["prediction"], "picture", "report_data")
        plan["prediction"] = prediction
        prediction["exposures"] = [_with_axis(each) for each in prediction["exposures"]]
        prediction["events"] = [
            [name, axis_name(stream), *rest] for name, stream, *rest in prediction["events"]
        ]
        report_data = prediction["report_data"]
        traffic = [_with_axis(each) for each in report_data["traffic"]]
        prediction["report_data"] = {**report_data, "traffic": traffic}
    return plan


def axis_name(name: str) -> str:
    """Name in schema 7 of an axis or level of schema 6, which names the data axis by ZeRO stage.

    >>> axis_name("dp_shard"), axis_name("dp.within"), axis_name("tp"), axis_name("compute")
    ('dp', 'dp.intra_node', 'tp', 'compute')
    """
    axis, dot, part = name.partition(".")
    return (DATA_AXIS if axis in DATA_STORAGE_AXES else axis) + dot + _LEVELS.get(part, part)


def _rename(fields: Mapping[str, Any], before: str, after: str) -> dict[str, Any]:
    return {after if name == before else name: value for name, value in fields.items()}


def _rename_axes(table: Iterable[tuple[str, int]]) -> list[list[Any]]:
    return [[axis_name(name), value] for name, value in table]


def _with_axis(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {**fields, "axis": axis_name(fields["axis"])}
