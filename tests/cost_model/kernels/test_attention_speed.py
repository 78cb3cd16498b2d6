"""Attention on GPUs that are not here."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.cost_model.kernels.attention_speed import AttentionSpeed
from autopar.cost_model.kernels.gemm_efficiency import FULL_WAVES
from autopar.cost_model.kernels.timing import flops_of

H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"
CAUSAL = {"backward": False, "causal": True}


def rate(device: str, peak: float, kernel: str, length: int, head: int, **mode: bool) -> float:
    speed = AttentionSpeed.of(device, peak, {"attention": kernel})
    return speed.rate(length, head, **mode) / 1e12


def test_rates_are_those_published() -> None:
    forward = {"backward": False, "causal": True}
    assert rate(H100, 989.4e12, "flash-2", 2048, 128, **forward) == pytest.approx(298)
    assert rate(H100, 989.4e12, "flash-3", 32768, 128, **forward) == pytest.approx(616)
    whole = {"backward": True, "causal": False}
    assert rate(H100, 989.4e12, "cudnn", 4096, 64, **whole) == pytest.approx(417)
    assert rate(H100, 989.4e12, "flash-1", 4096, 64, **whole) == pytest.approx(279 / 2)
    assert rate(A100, 312e12, "flash-3", 16384, 128, **whole) == pytest.approx(197)


def test_longer_rows_wider_heads_and_forwards_are_faster() -> None:
    speed = AttentionSpeed.of(H100, 989.4e12, {})
    rates = [speed.rate(n, 128, backward=True, causal=True) for n in (128, 600, 3000, 9000)]
    assert rates == sorted(rates)
    heads = [speed.rate(4096, head, backward=False, causal=True) for head in (64, 96, 128)]
    assert heads == sorted(heads)
    assert speed.rate(4096, 128, backward=True, causal=True) < heads[-1]


def test_a_causal_node_counts_half_of_its_products() -> None:
    def attend(q: torch.Tensor) -> torch.Tensor:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(q, q, q, 0.0, True)[0]  # type: ignore[no-any-return]

    q = torch.empty(1, 4, 2048, 128, dtype=torch.bfloat16, device="meta")
    graph = make_fx(attend)(q).graph
    (node,) = (n for n in graph.nodes if "flash" in str(n.target))
    for each in graph.nodes:
        each.meta.setdefault("val", q)
    flops = flops_of(node)
    assert flops == 4.0 * 4 * 2048**2 * 128
    seconds = AttentionSpeed.of(H100, 989.4e12, {"attention": "flash-2"}).seconds(node, flops)
    assert seconds == pytest.approx(flops / 2 / 298e12)


@pytest.mark.parametrize(
    ("release", "kernel"),
    [("2.4.1", "flash-2"), ("2.5.0", "cudnn"), ("2.5.1+cu124", "flash-2"), ("2.10.0", "flash-2"),
     ("2.11.0+cu130", "cudnn"), ("3.0.0", "cudnn")],
)  # fmt: skip
def test_the_release_of_torch_tells_the_kernel(release: str, kernel: str) -> None:
    speed = AttentionSpeed.of(H100, 989.4e12, {"torch": release})
    assert (speed.kernel, speed.blocks) == (kernel, "flash-2")
    assert AttentionSpeed.of(A100, 312e12, {"torch": release}).kernel == "flash-2"
    named = AttentionSpeed.of(H100, 989.4e12, {"torch": release, "attention": "flash-3"})
    assert (named.kernel, named.blocks) == ("flash-3", "flash-3")


def test_a_limit_of_power_slows_attention_as_it_slows_products() -> None:
    limited = rate("NVIDIA H100 96GB HBM2e", 989.4e12, "flash-2", 8192, 128, **CAUSAL)
    assert limited / rate(H100, 989.4e12, "flash-2", 8192, 128, **CAUSAL) == pytest.approx(
        FULL_WAVES["H100 96GB HBM2e"].full / FULL_WAVES["H100"].full
    )


def test_triton_is_slower_in_the_backward() -> None:
    for backward, slower in ((False, 1.4), (True, 2.0)):
        mode = {"backward": backward, "causal": True}
        newer, triton = (
            rate(A100, 312e12, kernel, 2048, 128, **mode)
            for kernel in ("flash-2", "flash-1-triton")
        )
        assert newer / triton == pytest.approx(slower)
