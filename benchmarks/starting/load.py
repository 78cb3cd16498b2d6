"""Part `load`: a sharded safetensors checkpoint read by two processes."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import safetensors
import torch
from torch import Tensor, multiprocessing, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor

import autopar
from benchmarks.launch import free_port
from benchmarks.starting.bytes import LiveBytes
from benchmarks.starting.llamas import MEDIUM, on_meta, shares, tokens
from examples.plan_llama import Llama

FILES = 4
LOADED = {
    "zero3": autopar.Strategy(zero=3),
    "tp 2": autopar.Strategy(tp=2, zero=0),
    "pp 2": autopar.Strategy(pp=2, zero=0, micro_batches=2, schedule="1f1b"),
}


def save_sharded(model: nn.Module, folder: Path) -> None:
    """Write a checkpoint in Hugging Face's layout."""
    from safetensors.torch import save_file

    state = model.state_dict()
    where = {name: f"model-{i % FILES}.safetensors" for i, name in enumerate(state)}
    for file in set(where.values()):
        save_file({n: x for n, x in state.items() if where[n] == file}, folder / file)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def load_on_rank(rank: int, port: int, folder: Path) -> None:
    """Load the checkpoint under each strategy; writes the figures of this rank."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {name: load(strategy, folder) for name, strategy in LOADED.items()}
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def load(strategy: autopar.Strategy, folder: Path) -> dict[str, Any]:
    model, files = on_meta(MEDIUM), {"open": 0, "most": 0}
    compiled = autopar.compile(model, strategy=strategy, example_inputs=tokens("cpu"))
    entered, left = safetensors.safe_open.__enter__, safetensors.safe_open.__exit__

    class Counted:
        """A file that tells when it is open."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.file = safe_open(*args, **kwargs)

        def __enter__(self) -> Any:
            files["open"] += 1
            files["most"] = max(files.values())
            return entered(self.file)

        def __exit__(self, *error: Any) -> None:
            files["open"] -= 1
            left(self.file, *error)

    safe_open = safetensors.safe_open
    with patch.object(safetensors, "safe_open", Counted), LiveBytes() as counted:
        keys = autopar.load_pretrained(compiled, folder)
        compiled.materialize_parameters()
    assert keys == ([], [])
    torch.manual_seed(0)
    plain = Llama(MEDIUM).state_dict()
    same = {name: torch.equal(_whole(x), plain[name]) for name, x in compiled.state_dict().items()}
    figures = {**shares(model), "peak": counted.peak, "most_open": files["most"]}
    return {**figures, "tensors": len(plain), "same": sum(same.values())}


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def run() -> dict[str, Any]:
    """Load on two processes; the figures of the rank with the most bytes beyond its share."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.manual_seed(0)
        save_sharded(Llama(MEDIUM), folder)
        multiprocessing.spawn(load_on_rank, (free_port(), folder), nprocs=2)
        ranks = [json.loads((folder / f"rank-{r}.json").read_text()) for r in range(2)]
    return {
        f"load, {name}, 2 ranks": max(
            (own[name] for own in ranks), key=lambda row: row["peak"] - row["share"]
        )
        for name in LOADED
    }
