"""`load_pretrained`: shards from safetensors files, reading only what a rank keeps."""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import autopar
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
        held = sum(_local(p).numel() for p in model.parameters() if not p.is_meta)
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
