import random
from itertools import pairwise

import pytest
import torch

from autopar.cost_model.memory.allocator import (
    CachingAllocator,
    HostAllocator,
    context_bytes,
    segment_bytes,
    workspace_bytes,
)

KB, MB = 2**10, 2**20


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (512, 2 * MB),
        (MB, 2 * MB),
        (MB + 512, 20 * MB),
        (10 * MB - 512, 20 * MB),
        (10 * MB, 10 * MB),
        (11 * MB, 12 * MB),
    ],
)
def test_segments_of_the_gpu(size, segment):
    assert segment_bytes(size) == segment


def test_small_and_large_requests_share_segments_of_their_own():
    gpu = CachingAllocator()
    for size in (1, 600, 3 * MB):
        gpu.malloc(size)
    assert gpu.allocated == 512 + 1024 + 3 * MB
    assert gpu.reserved == 2 * MB + 20 * MB
    gpu.malloc(16 * MB)  # what is left of the 20 MiB would do, but for one
    gpu.malloc(17 * MB)
    assert gpu.reserved == 2 * MB + 20 * MB + 18 * MB


def test_a_rest_of_little_use_is_not_cut_off():
    gpu = CachingAllocator()
    block = gpu.malloc(19 * MB + 512 * KB)
    assert gpu.size(block) == gpu.allocated == 20 * MB


def test_free_neighbours_grow_together_and_stay_reserved():
    gpu = CachingAllocator()
    blocks = [gpu.malloc(5 * MB) for _ in range(4)]
    for index in (1, 3, 2):
        gpu.free(blocks[index])
    assert gpu.reserved == 20 * MB
    assert gpu.malloc(15 * MB) == blocks[1]
    assert gpu.reserved == 20 * MB


def test_fragments_make_reserved_more_than_allocated():
    gpu = CachingAllocator()
    blocks = [gpu.malloc(12 * MB) for _ in range(2)]
    for block in blocks:
        gpu.free(block)
    gpu.malloc(24 * MB)
    assert (gpu.allocated, gpu.reserved) == (24 * MB, 48 * MB)


def test_what_is_freed_can_be_had_again():
    """Any sequence: blocks do not overlap, and in the end all of each segment is free."""
    gpu, draw, held = CachingAllocator(), random.Random(0), {}
    for _ in range(2000):
        if held and draw.random() < 0.5:
            address = draw.choice(list(held))
            assert gpu.size(address) == held.pop(address)
            gpu.free(address)
        else:
            address = gpu.malloc(draw.choice([0, 1, 700, 300 * KB, 2 * MB, 11 * MB]))
            held[address] = gpu.size(address)
        real = sorted((a, s) for a, s in held.items() if s)
        assert all(a + s <= b for (a, s), (b, _) in pairwise(real))
        assert gpu.allocated == sum(held.values()) <= gpu.reserved
    for address in held:
        gpu.free(address)
    free = [size for pool in gpu._free.values() for size, _ in pool]
    assert (gpu.allocated, sum(free)) == (0, gpu.reserved)
    assert set(free) == {2 * MB, 12 * MB, 20 * MB}


def test_memory_of_the_host_is_aligned_and_given_back():
    host = HostAllocator()
    block = host.malloc(100)
    host.malloc(0)
    assert (host.allocated, host.reserved, host.size(block)) == (100, 128, 100)
    host.free(block)
    assert (host.allocated, host.reserved) == (0, 0)


def test_what_is_outside_of_tensors():
    assert context_bytes("cpu") == workspace_bytes("cpu") == 0
    assert context_bytes("Tesla V100-SXM2-16GB") < context_bytes("a GPU of next year")
    assert workspace_bytes("NVIDIA H100 80GB HBM3") > workspace_bytes("NVIDIA A100-SXM4-80GB")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_gpu_agrees():
    gpu, draw, held = CachingAllocator(), random.Random(1), []
    torch.cuda.empty_cache()
    first = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
    if first != (0, 0):
        pytest.skip("something is on the GPU already")
    for _ in range(300):
        if held and draw.random() < 0.5:
            address, tensor = held.pop(draw.randrange(len(held)))
            gpu.free(address)
            del tensor
        else:
            size = draw.choice([1, 700, 300 * KB, 2 * MB, 11 * MB])
            held.append((gpu.malloc(size), torch.empty(size, dtype=torch.uint8, device="cuda")))
        assert torch.cuda.memory_allocated() == gpu.allocated
        assert torch.cuda.memory_reserved() == gpu.reserved
