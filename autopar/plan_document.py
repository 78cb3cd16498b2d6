"""A plan as a JSON document: what it holds, as values again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autopar.compression import Compressions
from autopar.errors import PlanError
from autopar.levels import Levels
from autopar.partition import Partition
from autopar.passes.bucket_collectives import Buckets
from autopar.passes.schedule_overlap import Overlap
from autopar.pipeline import Pipeline
from autopar.prediction import Prediction, RunnerUp


def read(document: Any, names: Sequence[str], version: int, source: str) -> dict[str, Any]:
    """The fields of a plan, by name.

    Args:
        document: as `Plan.to_dict` wrote it.
        names: of the fields.
        version: of the schema that they are of.
        source: what to call the document in errors.

    Raises:
        PlanError: it is of another version, or has other fields.
    """
    found = document.get("schema_version") if isinstance(document, dict) else None
    if found != version:
        raise PlanError(
            f"{source} has plan schema {found!r}; this autopar reads {version}. "
            "Make the plan again with this version."
        )
    if strange := sorted(set(document) ^ set(names)):
        raise PlanError(f"{source} lacks or has strange fields of a plan: {strange}")
    values = {name: _frozen(value) for name, value in document.items()}
    values["buckets"] = Buckets(**_frozen_dict(document["buckets"]))
    if document["prediction"] is not None:
        values["prediction"] = Prediction.from_dict(_frozen_dict(document["prediction"]))
    values["compressions"] = Compressions(**_frozen_dict(document["compressions"]))
    values["levels"] = tuple(Levels(**_frozen_dict(own)) for own in document["levels"])
    values["overlaps"] = tuple(Overlap(**_frozen_dict(own)) for own in document["overlaps"])
    values["partitions"] = tuple(Partition(**_frozen_dict(p)) for p in document["partitions"])
    if document["pipeline"] is not None:
        values["pipeline"] = Pipeline(**_frozen_dict(document["pipeline"]))
    values["runners_up"] = tuple(RunnerUp(**_frozen_dict(r)) for r in document["runners_up"])
    return values


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return _frozen_dict(value)
    return tuple(_frozen(v) for v in value) if isinstance(value, list) else value


def _frozen_dict(value: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _frozen(v) for k, v in value.items()}
