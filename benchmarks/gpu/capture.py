"""Part `capture`: graphs of models on the GPU beside those of the CPU, and plans beside a laptop's.

A row of a capture keeps the names of its nodes, from which CPU tests can be made.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import autopar
from autopar.capture.batch_slices import capture_of_rank
from benchmarks.gpu.setting import Setting

PRECISIONS: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16}
STRATEGIES: dict[str, Any] = {
    "tp2": autopar.Strategy(tp=2, zero=0),
    "cp2": autopar.Strategy(cp=2, zero=0),
}


def run(setting: Setting) -> None:
    for name, (make, inputs) in setting.models.items():
        for precision, dtype in PRECISIONS.items():
            with setting.case(f"{name} {precision}"):
                capture(setting, f"{name} {precision}", make(), inputs, dtype)
        if name != "gpt":
            continue
        for label, strategy in STRATEGIES.items():
            with setting.case(f"{name} plan {label}"):
                here = plan(make().to(setting.device), inputs, strategy)
                with torch.device("meta"):
                    model = make()
                elsewhere = plan(model, moved(inputs, "meta"), strategy)
                same = here.to_json() == elsewhere.to_json()
                remark = "as on a laptop" if same else "not the plan of a laptop"
                setting.row(f"{name} plan {label}", remark, ok=same, digest=here.digest())


def capture(
    setting: Setting, case: str, model: nn.Module, inputs: Any, dtype: torch.dtype | None
) -> None:
    """Write the nodes of a graph, and the first that differs from the CPU's."""
    names = {
        device: [
            f"{node.name} {node.target}"
            for node in capture_of_rank(
                model.to(device), moved(inputs, device), 0, 1, autocast=dtype, comm_backend="nccl"
            ).graph.nodes
        ]
        for device in ("cpu", str(setting.device))
    }
    on_cpu, own = names["cpu"], names[str(setting.device)]
    pairs = zip(own, on_cpu, strict=False)
    other = next((f"{a} instead of {b}" for a, b in pairs if a != b), "")
    other = other or ("" if len(own) == len(on_cpu) else "the rest is missing")
    setting.row(case, other or "as on the CPU", ok=not other, nodes=own)


def plan(model: nn.Module, inputs: Any, strategy: Any) -> autopar.Plan:
    return autopar.plan(
        model,
        8,
        example_inputs=inputs,
        strategy=strategy,
        precision="bf16",
        cluster=autopar.Cluster.named("dgx-h100", 1),
    )


def moved(inputs: Any, device: str) -> Any:
    return pytree.tree_map(lambda x: x.to(device), inputs)
