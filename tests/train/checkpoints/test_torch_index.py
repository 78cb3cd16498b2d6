"""An index of torch is read as data: it ends, calls nothing, changes nothing and stays inside."""

import io
import pickle
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    Metadata,
    MetadataIndex,
)

from autopar.train.checkpoints.torch_index import INDEX, read_index


def _nested() -> Any:
    """A tuple whose hash takes 2^60 steps."""
    value: Any = (1,)
    for _ in range(60):
        value = (value, value)
    return value


def _pickled_with_key(key: Any) -> bytes:
    """A pickle of {key: 1}, which Python would hash on the way."""
    return pickle.dumps([key, 1], 4).replace(b"]", b"}").replace(b"e.", b"u.")


class _Call:
    def __init__(self, function: Any, *args: Any) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> Any:
        return self.function, self.args


def test_torch_writes_what_is_read(tmp_path: Path) -> None:
    layer = torch.nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = {"layer": layer.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
    checkpoint.save(state, checkpoint_id=tmp_path, no_dist=True)
    with (tmp_path / INDEX).open("rb") as file:
        index = read_index(tmp_path, file)
    assert index == pickle.loads((tmp_path / INDEX).read_bytes())


class _ByName(pickle.Pickler):
    """Pickles members of an Enum as Python 3.11.2 does."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Enum):
            return getattr, (type(value), value.name)
        return NotImplemented


def test_indices_of_python_3_11_2_are_read(tmp_path: Path) -> None:
    checkpoint.save({"weight": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    written = io.BytesIO()
    _ByName(written).dump(index := pickle.loads((tmp_path / INDEX).read_bytes()))
    assert b"getattr" in written.getvalue()
    assert read_index(tmp_path, io.BytesIO(written.getvalue())) == index


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(_Call(getattr, Path, "touch")),
        pickle.dumps(_Call(getattr, _MEM_FORMAT_ENCODING, "__class__")),
        _pickled_with_key(_nested()),
        pickle.dumps(Metadata({}, planner_data={"a": _nested()})),
        pickle.dumps(Metadata({}, storage_data={MetadataIndex("a"): _StorageInfo("../b", 0, 1)})),
        pickle.dumps(Metadata({"a": 1})),  # type: ignore[dict-item]
        pickle.dumps(_Call(Path.touch, Path("called"))),
        pickle.dumps({"a": torch.strided, "b": {1}}),
        b"\x80\x04\x8c\x05torch\x8c\x04Size\x93}\x8c\x04nameK\x01sb.",  # torch.Size.name = 1
        pickle.dumps([1, 2]),
        b"",
        b"\x80\x04}.",
    ],
)
def test_others_are_refused(content: bytes, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((pickle.UnpicklingError, EOFError)):
        read_index(tmp_path, io.BytesIO(content))
    assert not list(tmp_path.iterdir())
    assert not hasattr(torch.Size, "name")
