"""`Setting`: the device of a part, its models and its clock, or their stand-ins in a dry run."""

from __future__ import annotations

import importlib.util
import json
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.cost_model.kernels.queue_timing import QueueTimer
from benchmarks.models import GPT, ConvNet, DecoderBlock

MIB = 2**20
L2_BYTES = 128 * MIB  # more than any L2 cache
CLASSES = 8  # of images


class DropoutBlock(DecoderBlock):
    """A decoder's block with dropout in its attention and after it."""

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        p = 0.1 if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        x = x + F.dropout(self.out(attended.transpose(1, 2).flatten(2)), 0.1, self.training)
        return x + self.feed(self.norm2(x))


class FlexBlock(DecoderBlock):
    """A decoder's block whose attention is FlexAttention."""

    def forward(self, x: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = flex_attention(q, k, v)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.feed(self.norm2(x))


@dataclass(frozen=True)
class Setting:
    dry: bool  # whether the CPU stands in for the GPU
    rows: Path  # file of results, a line each
    rank: int
    layers: int = 12  # of the GPT on a GPU

    @cached_property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.dry else torch.device("cuda", 0)

    def row(self, case: str, remark: str = "", *, ok: bool = True, **figures: Any) -> None:
        """Write a result at once, so that it survives what follows; only rank 0 writes."""
        if self.rank == 0:
            line = json.dumps({"case": case, "ok": ok, "remark": remark, **figures})
            with self.rows.open("a") as file:
                file.write(line + "\n")

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """Turn an error of a case into its row."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            frames = [
                f for f in traceback.extract_tb(error.__traceback__) if "autopar" in f.filename
            ]
            at = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
            self.row(name, f"{type(error).__name__}: {str(error)[:300]}{at}", ok=False)

    @property
    def elements(self) -> int:
        """Elements of a message."""
        return 2**12 if self.dry else 2**22

    # Models.

    @cached_property
    def sizes(self) -> dict[str, int]:
        if self.dry:
            return {"layers": 2, "vocabulary": 128, "width": 32, "heads": 4}
        return {"layers": self.layers, "vocabulary": 50304, "width": 768, "heads": 12}

    def gpt(self, block: type[DecoderBlock] = DecoderBlock, **changes: int) -> nn.Module:
        return GPT(**{**self.sizes, **changes}, block=block)  # type: ignore[arg-type]

    def tokens(self, rows: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Rows of 128 tokens (16 in a dry run) and the tokens that follow each."""
        drawn, length = torch.Generator().manual_seed(seed), 16 if self.dry else 128
        text = torch.randint(self.sizes["vocabulary"], (rows, length + 1), generator=drawn)
        text = text.to(self.device)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def images(self, rows: int = 8) -> tuple[Tensor, Tensor]:
        x = torch.randn(rows, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        return x.to(self.device), torch.arange(rows, device=self.device) % CLASSES

    @cached_property
    def models(self) -> dict[str, tuple[Callable[[], nn.Module], Any]]:
        """Makers of small models, with their inputs; two layers are enough for a capture."""
        two = {"layers": 2}
        found: dict[str, tuple[Callable[[], nn.Module], Any]] = {
            "gpt": (lambda: self.gpt(**two), self.tokens()),
            "gpt-dropout": (lambda: self.gpt(DropoutBlock, **two), self.tokens()),
            "gpt-flex": (lambda: self.gpt(FlexBlock, **two), self.tokens()),
            "conv": (ConvNet, self.images()),
        }
        if importlib.util.find_spec("transformers") is not None:
            found |= {name: self._pretrained(name) for name in ("gpt2", "llama")}
        return found

    def _pretrained(self, name: str) -> tuple[Callable[[], nn.Module], Any]:
        import transformers

        width, vocabulary = self.sizes["width"], self.sizes["vocabulary"]
        tokens = self.tokens()[0]

        def make() -> nn.Module:
            if name == "gpt2":
                config = transformers.GPT2Config(
                    vocab_size=vocabulary, n_embd=width, n_layer=2, n_head=4, use_cache=False
                )
                return transformers.GPT2LMHeadModel(config)
            llama = transformers.LlamaConfig(
                vocab_size=vocabulary,
                hidden_size=width,
                intermediate_size=2 * width,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                use_cache=False,
            )
            return transformers.LlamaForCausalLM(llama)

        return make, {"input_ids": tokens, "labels": tokens}

    # Clocks and memory.

    def synchronize(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def timed(self, call: Callable[[], object], runs: int = 10) -> tuple[float, float]:
        """Return median milliseconds of host time to issue a call, and of device time."""
        call()
        hosts, devices = [], []
        for _ in range(runs):
            self.synchronize()
            start = time.perf_counter()
            if self.dry:
                call()
                hosts.append(1e3 * (time.perf_counter() - start))
                devices.append(hosts[-1])
                continue
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            hosts.append(1e3 * (time.perf_counter() - start))
            end.synchronize()
            devices.append(begin.elapsed_time(end))
        return median(hosts), median(devices)

    def queued(self, call: Callable[[], object]) -> tuple[float, float]:
        """Return milliseconds of host and device for a call, behind others in a queue.

        Events around a single call would count the launch, which a queue hides.
        """
        if self.dry:
            return self.timed(call)
        timed = QueueTimer().time_call([call])
        return 1e3 * timed.host_s, 1e3 * timed.device_s

    def flush_cache(self) -> None:
        """Evict the L2 cache."""
        torch.empty(
            L2_BYTES if not self.dry else MIB, dtype=torch.uint8, device=self.device
        ).zero_()

    def reset_memory(self) -> None:
        if not self.dry:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def memory(self) -> dict[str, float]:
        """Return the peaks of allocated and reserved memory since the reset, in MiB."""
        if self.dry:
            return {"allocated_mib": 0.0, "reserved_mib": 0.0}
        return {
            "allocated_mib": torch.cuda.max_memory_allocated() / MIB,
            "reserved_mib": torch.cuda.max_memory_reserved() / MIB,
        }
