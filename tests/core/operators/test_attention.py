"""`autopar::attention`: torch's function, dense or fused, and one graph from every device."""

import contextlib
import re
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar._torch import patched
from autopar.capture.batch_slices import capture_of_rank
from autopar.core.ir.graph import TrainingGraph, elements
from autopar.core.ir.placement import Shard
from autopar.core.operators.attention import attention, attention_backward, attention_like
from autopar.passes.core.runner import run_passes
from autopar.passes.tensor_parallel.partition_axis import PartitionAxis
from autopar.planner.placement.unmeasured import partition_by_bytes
from tests.passes.partitions import captured as captured_whole

aten = torch.ops.aten
HALF, FULL, DOUBLE = torch.bfloat16, torch.float32, torch.float64


def operands(dtype: torch.dtype, key_heads: int, mask: str, causal: bool) -> tuple[Any, ...]:
    """Queries, keys, values and a mask: "", "bool", "float", or "trained"."""
    q, k, v = (
        torch.randn(2, rows, heads, 16, dtype=dtype).transpose(1, 2).requires_grad_()
        for rows, heads in ((6, 4), (8, key_heads), (8, key_heads))
    )
    m = None
    if mask == "bool":
        m = torch.rand(2, 1, 6, 8) > 0.2
    elif mask:
        m = torch.randn(4, 6, 8, dtype=dtype, requires_grad=mask == "trained")
    return q, k, v, m


CALLS = [
    (dtype, key_heads, mask, causal, dropout)
    for dtype, key_heads, mask, causal, dropout in product(
        (HALF, FULL, DOUBLE), (4, 2), ("", "bool", "float", "trained"), (False, True), (0.0, 0.3)
    )
    if not (mask and causal)
]


@pytest.mark.parametrize("dtype", [HALF, FULL, DOUBLE], ids=str)
def test_is_torchs_function_with_its_gradients_and_its_draws(dtype: torch.dtype) -> None:
    for _, key_heads, mask, causal, dropout in (c for c in CALLS if c[0] == dtype):
        torch.manual_seed(0)
        q, k, v, m = operands(dtype, key_heads, mask, causal)
        wanted = [q, k, v, *([m] if mask == "trained" else [])]
        found = []
        for function in (F.scaled_dot_product_attention, attention_like):
            torch.manual_seed(1)
            out = function(q, k, v, m, dropout, causal, enable_gqa=key_heads < 4)  # type: ignore[operator]
            found.append((out, *torch.autograd.grad(out.square().sum(), wanted)))
        bound = 20 * torch.finfo(dtype).eps
        for plain, own in zip(*found, strict=True):
            error = (plain - own).abs().max() / plain.abs().max()
            assert error <= bound, (key_heads, mask, causal, dropout)


def test_fakes_are_like_the_results() -> None:
    for dtype, key_heads, mask, causal, dropout in CALLS[::7]:
        q, k, v, m = operands(dtype, key_heads, mask, causal)
        call = (dropout, causal, None, [])
        torch.library.opcheck(attention, (q, k, v, m, *call), test_utils=("test_faketensor",))
        detached = [None if t is None else t.detach() for t in (q, k, v, m)]
        results = attention(*detached, *call)
        backward = (results[0], *detached, *results, mask == "trained", *call)
        torch.library.opcheck(attention_backward, backward, test_utils=("test_faketensor",))


# -- one graph -----------------------------------------------------------------------------------


class Layer(nn.Module):
    """Attention of four heads; two key heads if grouped; a mask with a gradient if biased."""

    def __init__(self, *, grouped: bool = False, biased: bool = False, dropout: float = 0.0):
        super().__init__()
        self.project = nn.Linear(16, 32 if grouped else 48)
        self.bias = nn.Parameter(torch.zeros(1, 4, 8, 8)) if biased else None
        self.grouped, self.dropout = grouped, dropout

    def forward(self, x: Tensor) -> Tensor:
        parts = self.project(x).unflatten(-1, (-1, 4)).transpose(1, 2)
        q, k, v = parts.split([4, 2, 2] if self.grouped else [4, 4, 4], 1)
        out = F.scaled_dot_product_attention(
            q, k, v, self.bias, self.dropout, self.bias is None, enable_gqa=self.grouped
        )
        return out.transpose(1, 2).flatten(-2).square().mean()


def as_cuda_calls(kind: str) -> contextlib.AbstractContextManager[None]:
    """Replaces torch's function by CUDA's kernels, called by their names in aten."""

    def call(
        q: Tensor, k: Tensor, v: Tensor, mask: Any = None, p: float = 0.0, causal: bool = False,
        scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if kind == "flash" and mask is None:
            return aten._scaled_dot_product_flash_attention(q, k, v, p, causal, scale=scale)[0]
        kernel = getattr(
            aten, f"_scaled_dot_product_{kind.replace('flash', 'efficient')}_attention"
        )
        return kernel(q, k, v, mask, True, p, causal, scale=scale)[0]

    return patched(F, "scaled_dot_product_attention", call)


def captured(model: nn.Module, dtype: torch.dtype = FULL) -> TrainingGraph:
    return capture_of_rank(model.to(dtype), (torch.randn(4, 8, 16, dtype=dtype),), 0, 2)


def text(graph: TrainingGraph) -> str:
    """A graph without the user's lines."""
    return re.sub(r"( +# |, first at ).*", "", str(graph))


@pytest.mark.parametrize(
    "options", [{"dropout": 0.1}, {"grouped": True}, {"biased": True}], ids=str
)
def test_graphs_are_the_same_with_cudas_kernels(options: dict[str, Any]) -> None:
    plain = text(captured(Layer(**options), HALF))
    assert "autopar.attention_backward" in plain
    for kind in ("flash", "efficient", "cudnn"):
        with as_cuda_calls(kind):
            assert text(captured(Layer(**options), HALF)) == plain


class Unpacks(Layer):
    """A model that reads more results of CUDA's kernel than the first."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (-1, 4)).transpose(1, 2).split([4, 4, 4], 1)
        out, statistics, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
        return out.square().mean() + statistics.detach().mean()


def test_a_kernel_whose_other_results_are_read_stays_and_is_divided() -> None:
    model, batch = Unpacks(), ((torch.randn(4, 8, 16),), {})
    graph, _ = captured_whole(model, batch, 2)
    (kernel,) = (n for n in graph.calls() if "flash_attention.default" in str(n.target))
    assert any(isinstance(value, int) for value in kernel.meta["val"])  # lengths of sequences
    assert all(e is None or isinstance(e, Tensor) for e in elements(kernel))
    strategies = partition_by_bytes(graph, 2, {"project.weight": Shard(0, 3)})
    assert kernel.name in dict(strategies)
    run_passes(graph, [PartitionAxis("tp", 1, strategies)])
