"""Copies of a GPU's values to its host, on emulated streams: numbers, order, and bounded memory."""

import contextlib
import gc
import mmap
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

import autopar
from autopar.core.operators import host_copies, offload, parameters
from autopar.core.operators.host_copies import HostCopies
from tests.harness.emulated_streams import emulated_streams

CPU = torch.device("cpu")
SIZE = 1 << 15


def there_and_back(folder: str, values: list[Tensor]) -> list[Tensor]:
    """Values that left and came back; their own memory is used for other values meanwhile."""
    tickets = []
    for value in values:
        ticket = offload.offload(value, folder)
        tickets.append(offload.offloaded(ticket, value))
        value.fill_(float("nan"))
    found = []
    for value, ticket in zip(values, tickets, strict=True):
        layout = list(value.shape), list(value.stride()), value.dtype, value.device
        buffer = offload.prefetch(ticket, folder, *layout)
        found.append(offload.prefetched(buffer, ticket) + 0)
    return found


def draw(count: int = 3) -> list[Tensor]:
    values = [torch.randn(SIZE // 64, 64) for _ in range(count)]
    values[1] = values[1].t()
    return values


@pytest.fixture(params=["host", "storage"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "" if request.param == "host" else str(tmp_path)


def test_values_come_back_and_their_memory_is_free_meanwhile(folder: str) -> None:
    before = set(offload._stored._values)  # of other tests
    with emulated_streams() as gpu:
        values = draw()
        want = [value.clone() for value in values]
        found = there_and_back(folder, values)
    for value, kept in zip(found, want, strict=True):
        torch.testing.assert_close(value, kept, rtol=0, atol=0)
    assert not gpu.errors
    assert gpu.copies == 6
    gc.collect()
    assert set(offload._stored._values) <= before


def test_later_steps_take_no_more_pinned_memory_memory(folder: str) -> None:
    with emulated_streams():
        sizes = []
        for _ in range(3):
            there_and_back(folder, draw())
            sizes.append(offload.copies_of(CPU).pinned_bytes)  # type: ignore[union-attr]
    assert sizes[0] == sizes[2] <= 3 * 4 * SIZE


def test_a_wait_that_is_left_out_is_seen() -> None:
    """The emulation would show a race."""
    with emulated_streams() as gpu, mock.patch.object(HostCopies, "wait"):
        values = draw()
        want = [value.clone() for value in values]
        found = there_and_back("", values)
    assert gpu.errors
    assert not all(torch.equal(x, y) for x, y in zip(found, want, strict=True))


def test_values_dropped_in_the_middle_are_copied_before_their_memory_goes(folder: str) -> None:
    with emulated_streams() as gpu:
        for _ in range(2):
            ticket = offload.offload(torch.randn(SIZE), folder)
            del ticket
        value = torch.randn(SIZE)
        ticket = offload.offloaded(offload.offload(value, folder), value)
        buffer = offload.prefetch(ticket, folder, [SIZE], [1], value.dtype, CPU)
        del ticket, buffer
        gc.collect()
        copies = offload.copies_of(CPU)
        assert copies is not None
        gpu.compute.wait_stream(copies._outward)  # type: ignore[arg-type]
        gpu.compute.wait_stream(copies._inward)  # type: ignore[arg-type]
    assert not gpu.errors


@torch.no_grad()
def test_stored_parameters_are_read_and_written_where_they_lie() -> None:
    before, reads = set(parameters._homes), set(parameters._reading)  # of other tests
    with emulated_streams() as gpu:
        parameter = torch.nn.Parameter(torch.randn(SIZE // 64, 64))
        want = parameter.detach().clone()
        parameters.store(parameter, "")
        for _ in range(2):
            read = parameters.fetched(parameters.fetch(parameter, ""))
            torch.testing.assert_close(read, want, rtol=0, atol=0)
            parameter.mul_(2)
            want = want * 2
        assert set(parameters._homes) > before
        assert set(parameters._reading) <= reads
        del parameter
        gc.collect()
    assert not gpu.errors
    assert set(parameters._homes) <= before


def test_too_little_memory_to_lock_is_an_error() -> None:
    def refused(size: int, device: torch.device) -> Tensor:
        raise RuntimeError("out of memory")

    with emulated_streams(), mock.patch.object(host_copies, "pinned_memory", refused):
        wanted = r"128.0 KiB of host memory cannot be pinned.*out of memory.*offload_dir"
        with pytest.raises(autopar.OffloadError, match=wanted):
            offload.offload(torch.randn(SIZE), "")


def test_a_cpu_has_no_memory_below_its_own_but_storage() -> None:
    with pytest.raises(autopar.OffloadError, match=r"model is on cpu: plan with.*offload_dir"):
        offload.check_lower_level("", CPU)


def test_pinned_pages_are_unregistered_before_they_are_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA would refuse copies of whatever gets their address next, as an H200 did."""
    registered: set[int] = set()
    runtime = mock.Mock()
    runtime.cudaHostRegister = lambda address, size, flags: registered.add(address) or 0
    runtime.cudaHostUnregister = registered.remove
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda error: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    memory = host_copies.pinned_memory(mmap.PAGESIZE, torch.device("cuda", 0))
    assert registered == {memory.data_ptr()}
    part = memory[:8].view(torch.int64)
    del memory
    assert registered  # a view keeps the pages
    del part
    assert not registered
