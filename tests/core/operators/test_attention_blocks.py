"""Blocks of attention: kernels of CUDA beside the dense formula, and what blocks leave out."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.nn.attention import SDPBackend

from autopar.core.operators import attention_blocks
from autopar.core.operators.attention import attention, attention_backward
from autopar.core.operators.attention_blocks import attention_block, attention_block_backward
from tests.harness.cuda_kernels import MathAttention

KERNEL = "autopar.core.operators.attention_blocks._kernel"
ROWS, KEYS, HALF = 6, 10, 5


def tensors(heads: int = 2) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    shapes = [(3, 2, ROWS, 8), *[(3, heads, KEYS, 8)] * 2, (3, 2, ROWS, 8)]
    return [torch.randn(shape, generator=gen, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("kernel", ["cpu", "flash", "efficient"])
def test_kernels_agree_with_the_dense_formula(kernel: str, heads: int) -> None:
    """The backward of a block reads the result and the log-sum-exp over further keys."""
    q, k, v, grad = tensors(heads)
    early = (k[:, :, :HALF], v[:, :, :HALF])
    out, logsumexp, _ = attention(q, k, v)
    found = []
    for chosen in ("dense", kernel):
        with mock.patch(KERNEL, return_value=chosen), MathAttention(blocks=True) as ran:
            # The implementations themselves: below an operator, a mode does not see what runs.
            forward = attention_blocks._run(q, *early)
            backward = attention_blocks._run_backward(grad, q, *early, out, logsumexp)
        assert bool(ran.kernels) == (chosen in ("flash", "efficient"))
        found.append([*forward, *backward])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6, check_dtype=False)


@pytest.mark.parametrize("dense", [False, True])
def test_two_halves_are_the_whole(dense: bool) -> None:
    q, k, v, grad = tensors()
    out, logsumexp, state = attention(q, k, v)
    whole = attention_backward(grad, q, k, v, None, out, logsumexp, state, False)[:3]
    chosen = {"return_value": "dense"} if dense else {"wraps": attention_blocks._kernel}
    with mock.patch(KERNEL, **chosen):
        for part, other in (("early", "late half of keys"), ("late", "early half of queries")):
            rows = slice(0, ROWS if part == "early" else ROWS // 2)
            keys = slice(HALF if part == "early" else 0, KEYS)
            saved = out[:, :, rows], logsumexp[:, :, rows]
            one = attention_block_backward(grad, q, k, v, out, logsumexp, False, part)
            inside = q[:, :, rows], k[:, :, keys], v[:, :, keys]
            two = attention_block_backward(grad[:, :, rows], *inside, *saved)
            for total, got, more, at in zip(whole, one, two, (rows, keys, keys), strict=True):
                got[:, :, at] += more
                torch.testing.assert_close(got, total, msg=other)
            block, statistics = attention_block(q, k, v, False, part)
            if part == "late":
                assert not block[:, :, rows].any()
                assert statistics[:, :, rows].eq(-torch.inf).all()
                torch.testing.assert_close(block[:, :, ROWS // 2 :], out[:, :, ROWS // 2 :])


@pytest.mark.parametrize(
    ("choice", "kernel"),
    [("FLASH_ATTENTION", "flash"), ("CUDNN_ATTENTION", "flash"),
     ("EFFICIENT_ATTENTION", "efficient"), ("MATH", "dense")],
)  # fmt: skip
def test_blocks_run_flash_kernels_where_torch_prefers_cudnn(choice: str, kernel: str) -> None:
    """torch 2.11 prefers cuDNN's kernels on Hopper; blocks were then computed densely."""
    q = SimpleNamespace(device=torch.device("cuda"), shape=(1, 8, 4096, 128))
    chosen = getattr(SDPBackend, choice).value
    name = "autopar.core.operators.attention_blocks.fused_attention_choice"
    with mock.patch(name, return_value=chosen):
        assert attention_blocks._kernel(q, q, q, True, None) == kernel
