"""`load_pretrained`: shards from safetensors files, reading only what a rank keeps."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import autopar
from autopar.runtime.parameters.distribute import is_remote
from autopar.runtime.parameters.safetensors_files import INDEX, SafetensorsFiles
from tests.harness.models import MODELS
from tests.harness.training import close, fixed, whole_state
from tests.harness.worlds import run

GPT = MODELS["gpt"]
INPUTS = GPT.batch(4, 0)[0]


def trained() -> nn.Module:
    """A model with other values than `GPT.make()` has."""
    model = GPT.make()
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.mul_(1.5).add_(index / 1000)
    return model


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return GPT.make()


def save_sharded(state: dict[str, Tensor], folder: Path, files: int = 3) -> Path:
    """Hugging Face's layout: several files and an index; a tied weight has one name."""
    names = [name for name in state if name != "head.weight"]
    where = {name: f"model-{i % files}.safetensors" for i, name in enumerate(names)}
    for file in dict.fromkeys(where.values()):
        save_file({name: state[name] for name in names if where[name] == file}, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


class Handles:
    """Counts files that are open at once, and the elements that are read of them."""

    def __init__(self) -> None:
        self.open, self.most, self.elements = 0, 0, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return Handle(self, safe_open(*args, **kwargs))


class Handle:
    def __init__(self, handles: Handles, file: Any) -> None:
        self.handles, self.file = handles, file

    def __enter__(self) -> "Handle":
        self.file.__enter__()
        self.handles.open += 1
        self.handles.most = max(self.handles.most, self.handles.open)
        return self

    def __exit__(self, *error: Any) -> None:
        self.handles.open -= 1
        self.file.__exit__(*error)

    def keys(self) -> Any:
        return self.file.keys()

    def get_tensor(self, name: str) -> Tensor:
        tensor: Tensor = self.file.get_tensor(name)
        self.handles.elements += tensor.numel()
        return tensor

    def get_slice(self, name: str) -> Any:
        return Slice(self.handles, self.file.get_slice(name))


class Slice:
    def __init__(self, handles: Handles, values: Any) -> None:
        self.handles, self.values = handles, values

    def get_shape(self) -> Any:
        return self.values.get_shape()

    def __getitem__(self, index: Any) -> Tensor:
        tensor: Tensor = self.values[index]
        self.handles.elements += tensor.numel()
        return tensor


def load(rank: int, world_size: int, folder: Path, setups: list[dict[str, Any]]) -> None:
    """The plain model's values bit for bit, on meta and real models, before and after a call."""
    state = trained().state_dict()
    for options in setups:
        model = autopar.compile(
            (on_meta if options.pop("meta", True) else GPT.make)(), fallback=False, **options
        )
        handles = Handles()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(safetensors, "safe_open", handles)
            keys = autopar.load_pretrained(model, folder)
            assert keys == ([], [])
            loss = model(*INPUTS)
        held = sum(_local(p).numel() for p in model.parameters() if not is_remote(p))
        assert handles.elements == held
        assert (handles.most, handles.open) == (1, 0)
        assert model.head.weight is model.embedding.token.weight
        have = whole_state(model)
        assert all(torch.equal(have[name], state[name]) for name in state)
        close(loss, trained()(*INPUTS), 1e-5)
        loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        autopar.load_pretrained(model, folder)
        have = whole_state(model)
        assert all(torch.equal(have[name], state[name]) for name in state)


def _local(parameter: Any) -> Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_sharded(trained().state_dict(), tmp_path)


@pytest.mark.slow
def test_shards_are_filled_from_a_sharded_checkpoint(folder: Path) -> None:
    strategies = [fixed(3), fixed(0, tp=2), fixed(0, pp=2)]
    setups = [{"strategy": strategy, "example_inputs": INPUTS} for strategy in strategies]
    late = [{"strategy": fixed(3)}, {**setups[0], "meta": False}]
    run(load, 2, folder=folder, setups=[*setups, *late])


@pytest.mark.slow
def test_nested_shards_are_filled(folder: Path) -> None:
    """Two axes shard one dim, and the fused projections lie in interleaved shards."""
    run(load, 4, folder=folder, setups=[{"strategy": fixed(3, tp=2), "example_inputs": INPUTS}])


def test_names_and_shapes_are_checked(tmp_path: Path) -> None:
    state = {k: v for k, v in trained().state_dict().items() if k != "head.weight"}
    del state["norm.bias"]
    state["other"] = torch.zeros(2)
    file = tmp_path / "weights.safetensors"
    save_file(state, file)
    model = autopar.compile(on_meta(), example_inputs=INPUTS, strategy="ddp")
    told = r"missing in the file: norm.bias; unexpected in the file: other"
    for path in (file, tmp_path):
        with pytest.raises(autopar.StrategyError, match=told):
            autopar.load_pretrained(model, path)
    assert autopar.load_pretrained(model, file, strict=False) == (["norm.bias"], ["other"])
    model(*INPUTS)
    have = model.state_dict()
    assert torch.equal(have["norm.weight"], state["norm.weight"])
    assert have["norm.bias"].eq(0).all()  # as LayerNorm initialises it
    save_file({**state, "norm.weight": torch.zeros(5)}, file)
    with pytest.raises(autopar.StrategyError, match=r"norm.weight has the shape \[5\]"):
        autopar.load_pretrained(model, file, strict=False)
    with pytest.raises(autopar.StrategyError, match="no file or folder"):
        autopar.load_pretrained(model, tmp_path / "elsewhere")
    with pytest.raises(autopar.StrategyError, match=r"takes what autopar\.compile returned"):
        autopar.load_pretrained(GPT.make(), file)  # type: ignore[arg-type]


def test_values_are_cast(tmp_path: Path) -> None:
    state = {k: v.double() for k, v in trained().state_dict().items() if k != "head.weight"}
    save_file(state, tmp_path / "model.safetensors")
    model = autopar.compile(on_meta(), example_inputs=INPUTS)
    autopar.load_pretrained(model, tmp_path)
    want = trained().state_dict()
    assert all(torch.equal(value, want[name]) for name, value in model.state_dict().items())


WHOLE = {k: v for k, v in trained().state_dict().items() if k != "head.weight"}


def _cut_short(folder: Path) -> None:
    file = folder / "model-1.safetensors"
    file.write_bytes(file.read_bytes()[:-40])


def _without_header(folder: Path) -> None:
    (folder / "model-1.safetensors").write_bytes(b"\xff" * 64)


def _a_pipe(folder: Path) -> None:
    (folder / "model-1.safetensors").unlink()
    os.mkfifo(folder / "model-1.safetensors")


def _a_pipe_as_index(folder: Path) -> None:
    (folder / INDEX).unlink()
    os.mkfifo(folder / INDEX)


def _moved(folder: Path) -> Path:
    """The second file of a folder, moved out of it."""
    outside = folder.parent / "outside.safetensors"
    (folder / "model-1.safetensors").rename(outside)
    return outside


def _a_link_outside(folder: Path) -> None:
    (folder / "model-1.safetensors").symlink_to(_moved(folder))


def _a_link_in_a_circle(folder: Path) -> None:
    (folder / "model-1.safetensors").unlink()
    (folder / "model-1.safetensors").symlink_to("model-1.safetensors")


def _named(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        _moved(folder)
        text = (folder / INDEX).read_text()
        (folder / INDEX).write_text(text.replace("model-1.safetensors", name))

    return change


def _text(content: str) -> Callable[[Path], None]:
    return lambda folder: (folder / INDEX).write_text(content) and None


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        (_cut_short, r"model-1\.safetensors cannot be read"),
        (_without_header, r"model-1\.safetensors cannot be read"),
        (_a_pipe, "not a regular file"),
        (_a_pipe_as_index, "not a regular file"),
        (_a_link_outside, "leads out of the folder"),
        (_a_link_in_a_circle, "is no file|cannot be read"),
        (_named("../outside.safetensors"), "leads out of the folder"),
        (_named("/etc/hostname"), "leads out of the folder"),
        (_named(r"\ud800"), "surrogate pair"),
        (_text('{"a":' * 100_000), "nested deeper|truncated"),
        (_text('{"weight_map": {"norm.bias": 3}}'), "Expected `str`, got `int`"),
        (_text("{}"), "weight_map"),
    ],
)
def test_broken_files_are_told(tmp_path: Path, broken: Callable[[Path], None], told: str) -> None:
    folder = tmp_path / "inside"
    folder.mkdir()
    broken(save_sharded(WHOLE, folder))
    with pytest.raises(autopar.CheckpointError, match=told):
        SafetensorsFiles.find(folder)


def test_the_cache_of_hugging_face_links_to_blobs(tmp_path: Path) -> None:
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshots" / "main" / "weights"
    folder.mkdir(parents=True)
    save_sharded(WHOLE, folder)
    blobs.mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(f"../../../blobs/{number}")
    assert SafetensorsFiles.find(folder).files.keys() == WHOLE.keys()
    assert SafetensorsFiles.find(folder / INDEX).files.keys() == WHOLE.keys()
