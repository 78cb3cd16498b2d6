"""Notes of a plan on its work."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar


class Experts(nn.Module):
    """Sorted rows times the matrix of their expert, which autocast does not cast."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 64, 64, dtype=dtype, device="meta"))
        self.head = nn.Linear(64, 8, dtype=dtype, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.arange(1, 5, dtype=torch.int32, device=x.device) * (x.shape[0] // 4)
        rows = F.grouped_mm(x.to(self.weight.dtype), self.weight, offs=ends)
        return self.head(rows).square().mean()


def notes_of(model: nn.Module, precision: str | None) -> list[str]:
    plan = autopar.plan(
        model,
        1,
        example_inputs=(torch.empty(512, 64, device="meta"),),
        strategy="ddp",
        cluster=autopar.Cluster.named("dgx-h100"),
        precision=precision,
    )
    return [note for note in plan.notes if "of the FLOPs run in float32" in note]


def test_products_that_autocast_leaves_in_float32_are_told_with_their_price() -> None:
    (note,) = notes_of(Experts(torch.float32), "bf16")
    assert note.startswith("84% of the FLOPs"), note  # two products of experts, three of the head
    assert "of a step at the peak of the device" in note
    assert not notes_of(Experts(torch.bfloat16), "bf16")
    assert not notes_of(Experts(torch.float32), "fp32")  # as asked for
