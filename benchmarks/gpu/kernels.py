"""Parts `nccl` and `stopwatch`: the backend alone, and operators alone."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.capture.batch_slices import capture_of_rank
from autopar.cost_model.kernels.queue_timing import QueueTimer
from autopar.cost_model.kernels.timing import Stopwatch, runnable
from autopar.cost_model.measurement.operator_times import computes, time_key
from benchmarks.gpu.setting import MIB, Setting

COUNT = 20  # operators at each end
c10d = torch.ops._c10d_functional


def nccl(setting: Setting) -> None:
    """A world of one: start, objects, collectives whose inputs are freed early, memory."""
    store = dist.HashStore()
    backend = "gloo" if setting.dry else "cpu:gloo,cuda:nccl"
    device = {} if setting.dry else {"device_id": setting.device}
    with setting.case("init_process_group"):
        start = time.perf_counter()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, **device)
        dist.all_reduce(torch.ones(1, device=setting.device))
        setting.synchronize()
        setting.row("init_process_group", backend, host_ms=1e3 * (time.perf_counter() - start))
    with setting.case("objects"):
        found = [None]
        dist.all_gather_object(found, {"a": 1})
        setting.row("objects", str(found), ok=found == [{"a": 1}])
    for name, issue in collectives().items():
        with setting.case(name):
            freed_early(setting, name, issue)
    with setting.case("communicators"):
        communicators(setting)
    dist.destroy_process_group()


def collectives() -> dict[str, Callable[[Tensor], Tensor]]:
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    return {
        "all_reduce": lambda x: c10d.all_reduce(x, "sum", name),
        "all_gather": lambda x: c10d.all_gather_into_tensor(x, 1, name),
        "reduce_scatter": lambda x: c10d.reduce_scatter_tensor(x, "sum", 1, name),
        "all_to_all": lambda x: c10d.all_to_all_single(x, [x.shape[0]], [x.shape[0]], name),
    }


def freed_early(setting: Setting, name: str, issue: Callable[[Tensor], Tensor]) -> None:
    """Free the input of an issued collective, take its memory again and overwrite it."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64):
        want = torch.arange(setting.elements, device=setting.device).remainder(100).to(dtype)
        wrong = 0
        for _ in range(2 if setting.dry else 20):
            given = want.clone()
            pending = issue(given)
            del given
            others = [torch.full_like(want, 101) for _ in range(2)]
            result = c10d.wait_tensor(pending)
            wrong += int((result != want).sum())
            del others
        setting.row(f"{name} {str(dtype)[6:]}", f"{wrong} wrong elements", ok=not wrong)


def communicators(setting: Setting) -> None:
    """Device memory that each further communicator takes as it connects, in MiB."""
    taken = []
    for _ in range(4):
        before = 0 if setting.dry else torch.cuda.mem_get_info()[0]
        group = dist.new_group([0])
        dist.all_reduce(torch.ones(setting.elements, device=setting.device), group=group)
        setting.synchronize()
        taken.append((before - (0 if setting.dry else torch.cuda.mem_get_info()[0])) / MIB)
    setting.row("communicators", "MiB each: " + ", ".join(f"{x:.0f}" for x in taken), mib=taken)


def stopwatch(setting: Setting) -> None:
    """Operators as the planner times them, and alone with the L2 cache flushed before each run."""
    model, inputs = setting.gpt().to(setting.device), setting.tokens()
    graph = capture_of_rank(model, inputs, 0, 1, autocast=torch.bfloat16)
    nodes = {time_key(node): node for node in graph.calls() if computes(node)}
    host: dict[str, float] = {}
    if setting.dry:
        times = Stopwatch().times(nodes)
    else:
        timed = QueueTimer().times(nodes)
        times = {key: one.device_s for key, one in timed.items()}
        host = {key: one.host_s for key, one in timed.items()}
    ordered = sorted(times, key=lambda key: -times[key])
    chosen = dict.fromkeys([*ordered[:COUNT], *ordered[-COUNT:]])
    for key in chosen:
        with setting.case(key):
            call = runnable(nodes[key])
            assert call is not None
            by_events = alone(setting, call)
            ratio = 1e3 * times[key] / by_events
            setting.row(
                nodes[key].name,
                key,
                predicted_ms=1e3 * times[key],
                host_ms=1e3 * host.get(key, 0.0),
                device_ms=by_events,
                ratio=ratio,
            )


def alone(setting: Setting, call: Callable[[], object]) -> float:
    """Median milliseconds of a call after a flush of the cache."""
    if setting.dry:
        return setting.timed(call, runs=3)[1]
    runs = []
    for _ in range(10):
        setting.flush_cache()
        torch.cuda._sleep(200_000)  # cycles; the launch is then hidden
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        runs.append(begin.elapsed_time(end))
    return sorted(runs)[len(runs) // 2]
