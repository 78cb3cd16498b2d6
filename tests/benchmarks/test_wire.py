"""Bytes that leave a node: cost model against counters of interfaces."""

import json
import sys
from pathlib import Path

import pytest

from autopar.cost_model.algorithms.wire_bytes import HEADERS, MESSAGE_BYTES, leaving, messages
from autopar.cost_model.group_shape import GroupShape
from benchmarks.cluster import Network, Unavailable, launch

SIZES = (4096, 1 << 20)  # bytes
SEND = """
import json
import torch, torch.distributed as dist
from benchmarks.cluster.network import sent_bytes

dist.init_process_group("gloo")
ranks = dist.get_world_size()
found = []
for size in {SIZES}:
    whole, part = torch.ones(size // 4), torch.ones(size // 4 // ranks)
    out = torch.empty_like(whole)
    calls = {{
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(out, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "all_to_all": lambda: dist.all_to_all_single(out, whole),
    }}
    for name, call in calls.items():
        call()
        dist.barrier()
        before = sent_bytes()
        dist.barrier()
        for _ in range(8):
            call()
        dist.barrier()
        found.append((name, size, (sent_bytes() - before) / 8))
        dist.barrier()
print(json.dumps(found))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_nodes_send_the_bytes_of_the_cost_model(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SEND.format(SIZES=SIZES)]
    try:
        with Network(nodes=2) as network:
            launch(network, command, 2, logs=tmp_path, timeout_s=60)
    except Unavailable as reason:
        pytest.skip(str(reason))
    for name, size, counted in json.loads((tmp_path / "rank0.log").read_text().splitlines()[-1]):
        given = (name, GroupShape(4, 2), "gloo", 2)
        expected = HEADERS * leaving(*given) * size + MESSAGE_BYTES * messages(*given)
        assert counted == pytest.approx(expected, rel=0.02 if size == 1 << 20 else 0.2), name
