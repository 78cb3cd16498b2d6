"""Part `operators`: each operator of a GPT's step, timed in a queue, beside its price on paper.

The rows are what a curve of the cost model for this GPU can be made from.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx
from torch.profiler import ProfilerActivity, profile

import autopar
from autopar.capture.batch_slices import capture_of_rank
from autopar.cost_model.host import device_name
from autopar.cost_model.kernels.gemm_efficiency import multiplied_bytes, product_of
from autopar.cost_model.kernels.queue_timing import QueueTimer
from autopar.cost_model.kernels.roofline import Roofline
from autopar.cost_model.kernels.timing import Stopwatch, flops_of
from autopar.cost_model.measurement.operator_times import computes, moved_bytes, time_key
from autopar.passes.core.pass_pipeline import PassPipeline
from autopar.passes.core.runner import run_passes
from autopar.passes.memory.lower_attention import LowerAttention
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.steps import cases, stepper

MOST = 60  # kinds of operators of a profile


def run(setting: Setting) -> None:
    case = cases(setting)["GPT-2, 12 layers"]
    batch = case.batch()
    with setting.device:
        model = case.make()
    with setting.case("timed alone"):
        alone(setting, model, batch)
    with setting.case("profile"):
        compiled = autopar.compile(
            model, example_inputs=batch, strategy="ddp", precision="bf16", fallback=False
        )
        profiled(setting, stepper(compiled, batch, None))


def alone(setting: Setting, model: torch.nn.Module, batch: object) -> None:
    """Write a row for each operator: seconds alone, and by the data sheet."""
    graph = capture_of_rank(model, batch, 0, 1, autocast=torch.bfloat16, comm_backend="nccl")
    lowered = run_passes(graph, PassPipeline([LowerAttention("cpu" if setting.dry else "cuda")]))
    nodes: dict[str, fx.Node] = {}
    counts: dict[str, int] = {}
    for node in lowered.calls():
        if computes(node):
            nodes.setdefault(time_key(node), node)
            counts[time_key(node)] = counts.get(time_key(node), 0) + 1
    device = "NVIDIA H100 80GB HBM3" if setting.dry else device_name(setting.device)
    line = Roofline.default(device, 1)
    if setting.dry:
        times = {key: (s, s) for key, s in Stopwatch().times(nodes).items()}
    else:
        queued = QueueTimer().times(nodes)
        times = {key: (timed.device_s, timed.host_s) for key, timed in queued.items()}
    for key, (device_s, host_s) in sorted(times.items(), key=lambda item: -item[1][0]):
        node = nodes[key]
        flops, nbytes = flops_of(node), moved_bytes(node)
        priced_s = line.seconds(flops, nbytes, multiplied_bytes(node), product_of(node))
        setting.row(
            key,
            f"{counts[key]} times",
            device_ms=1e3 * device_s,
            host_ms=1e3 * host_s,
            predicted_ms=1e3 * priced_s,
            ratio=priced_s / device_s,
            count=counts[key],
            nbytes=nbytes,
            flops=flops,
        )


def profiled(setting: Setting, step: Callable[[], None]) -> None:
    """Write the time of each kind of operator in a whole step."""
    for _ in range(3):
        step()
    setting.synchronize()
    activities = [ProfilerActivity.CPU] + ([] if setting.dry else [ProfilerActivity.CUDA])
    with profile(activities=activities) as profiler:
        step()
        setting.synchronize()
    kinds = sorted(
        profiler.key_averages(),
        key=lambda kind: -max(kind.self_device_time_total, kind.self_cpu_time_total),
    )
    for kind in kinds[:MOST]:
        setting.row(
            f"profile: {kind.key[:100]}",
            f"{kind.count} times",
            device_ms=kind.self_device_time_total / 1e3,
            host_ms=kind.self_cpu_time_total / 1e3,
            count=kind.count,
        )
