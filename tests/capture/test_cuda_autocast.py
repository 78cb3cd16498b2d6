"""Captures on a CPU for GPUs cast as CUDA's autocast does."""

import re
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from scipy.optimize import milp
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.capture import cuda_autocast
from autopar.capture.batch_slices import capture_of_rank
from autopar.capture.cuda_autocast import autocast_for
from autopar.session.inspect import program_text
from tests.harness.models import MODELS

CPU, HALF = torch.device("cpu"), torch.bfloat16
HEADER = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"


@pytest.mark.parametrize(
    ("macro", "names"),
    [
        ("FP32", cuda_autocast.FLOAT32),
        ("LOWER_PRECISION_FP", cuda_autocast.LOWER),
        ("PROMOTE", cuda_autocast.PROMOTED),
        ("FP32_SET_OPT_DTYPE", cuda_autocast.FLOAT32_RESULT),
    ],
)
def test_the_operators_are_those_of_torch(macro: str, names: str) -> None:
    if torch.__version__ < "2.13" or not HEADER.exists():
        pytest.skip("the tables are those of torch 2.13")
    text = HEADER.read_text().partition(f"#define AT_FORALL_{macro}(_)")[2].partition("\n\n")[0]
    found = re.findall(r"_\((\w+)(?:, (\w+))?\)", text)
    want = {".".join(filter(None, pair)) for pair in found}
    assert len(want) > 5
    assert {name for name in names.split() if not name.startswith("norm.")} == want


X = torch.linspace(-1, 1, 32).view(4, 8)
IN_FLOAT32: dict[str, Callable[[Tensor], Tensor]] = {
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "softmax": lambda x: x.softmax(-1),
    "sum": lambda x: x.sum(0),
    "pow": lambda x: x**2,
    "norm": lambda x: x.norm(),
    "norm of a dim": lambda x: x.norm(dim=1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "mse_loss": lambda x: F.mse_loss(x, x * 2),
    "promoted": lambda x: torch.addcmul(x.float(), x, x),
}


@pytest.mark.parametrize("name", IN_FLOAT32)
def test_gpus_compute_in_float32(name: str) -> None:
    function, x = IN_FLOAT32[name], X.to(HALF)
    before = function(x).dtype
    with autocast_for(CPU, HALF, "nccl"):
        found = function(x)
    assert found.dtype == torch.float32
    assert torch.equal(found, function(x.float()).to(torch.float32))
    assert function(x).dtype == before
    with torch.autocast("cpu", HALF):
        assert F.layer_norm(x, (8,)).dtype == HALF, "the CPU's own autocast has changed"


def test_products_and_callers_keep_their_dtypes() -> None:
    with autocast_for(CPU, HALF, "nccl"):
        assert F.linear(X, X).dtype == HALF
        assert F.gelu(X.to(HALF)).dtype == HALF
        assert X.to(HALF).sum(0, dtype=HALF).dtype == HALF
        assert F.layer_norm(X.double(), (8,)).dtype == torch.float64
        assert torch.cdist(X, X).dtype == torch.float32


def test_a_capture_for_gpus_has_their_casts_in_their_order() -> None:
    """The model with its casts written out, in the order of torch's own kernels."""

    class Norm(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return F.layer_norm(
                    x.float(), self.normalized_shape, self.weight, self.bias, self.eps
                )

    def casts(norm: type[nn.LayerNorm], backend: str) -> list[str]:
        model = nn.Sequential(nn.Linear(8, 8), norm(8), nn.Linear(8, 8)).to("meta")
        x = torch.empty(4, 8, device="meta")
        graph = capture_of_rank(model, x, 0, 1, autocast=HALF, comm_backend=backend)
        forward = (node for node in graph.calls() if node.meta["phase"] == "forward")
        return [f"{node.name} {node.args} {node.meta['val']}" for node in forward]

    assert casts(nn.LayerNorm, "nccl") == casts(Norm, "gloo") != casts(nn.LayerNorm, "gloo")


def test_the_program_of_a_plan_is_not_solved_again() -> None:
    inputs = MODELS["gpt"].batch(8, 0)[0]
    node = autopar.Cluster.named("dgx-h100", 1)
    strategy = autopar.Strategy(tp=2, zero=0)
    model, options = MODELS["gpt"].make(), {"example_inputs": inputs, "strategy": strategy}
    plan = autopar.plan(model, 4, cluster=node, precision="bf16", **options)
    with patch("scipy.optimize.milp", wraps=milp) as solver:
        text = program_text(model, inputs, plan=plan)
    assert not solver.called
    assert "_scaled_dot_product_flash_attention" in text
