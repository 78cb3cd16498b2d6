"""The host waits for no accelerator inside a step; what it reads, it reads a call late."""

import contextlib
import traceback
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar._torch import patched
from autopar.runtime import batch_checks
from autopar.runtime.batch_checks import LateNumbers
from tests.harness.models import MODELS
from tests.harness.training import fixed
from tests.harness.worlds import Raised, run

READS = {getattr(torch.Tensor, name) for name in ("item", "tolist", "cpu", "numpy", "__bool__")}
READS |= {getattr(torch.Tensor, name) for name in ("cuda", "__float__", "__int__", "nonzero")}
CREATES = {torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor}
aten = torch.ops.aten


@contextlib.contextmanager
def pretend_accelerator() -> Iterator[None]:
    """Makes autopar treat every tensor as one of an accelerator.

    The function's code is replaced: a module imported meanwhile would keep another.
    """
    with patched(batch_checks.is_on_host, "__code__", (lambda tensor: False).__code__):
        yield


def is_of_autopar() -> bool:
    """Whether autopar's own or generated code is at work, and does not read late numbers."""
    frames = [frame for frame, _ in traceback.walk_stack(None)]
    if any(frame.f_code is LateNumbers.read.__code__ for frame in frames):
        return False
    files = [frame.f_code.co_filename for frame in frames if frame.f_code.co_filename != __file__]
    own = next((f for f in files if "/torch/" not in f and not f.startswith("<frozen")), "")
    return "/autopar/" in own or own.startswith("<eval_with_key>")


class Functions(TorchFunctionMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        creates = func in CREATES and kwargs.get("device") is not None
        moves = func is torch.Tensor.to and any(
            isinstance(x, (str, torch.device)) for x in (*args, *kwargs.values())
        )
        if (func in READS or creates or moves) and is_of_autopar():
            self.found.append("".join(traceback.format_stack(limit=6)))
        return func(*args, **kwargs)


class Operators(TorchDispatchMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        moves = func is aten._to_copy.default and kwargs.get("device") is not None
        reads = func in (aten._local_scalar_dense.default, aten.nonzero.default)
        if (moves or reads) and is_of_autopar():
            self.found.append("".join(traceback.format_stack(limit=6)))
        return func(*args, **kwargs)


@pytest.fixture
def two_fake_ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def syncs(strategy: autopar.Strategy, accumulate: bool) -> list[str]:
    """Places where a step of rank 0 synchronizes, once its programs are made."""
    case = MODELS["gpt"]
    args, _ = case.batch(4, 0)
    model = autopar.compile(case.make(), strategy=strategy, example_inputs=args)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    found: list[str] = []

    def step() -> None:
        if accumulate:
            with model.no_sync():
                model(*args).backward()
        model(*args).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    with Functions(found), Operators(found):
        step()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("name", ["ddp", "zero3", "tp", "pp", "interleaved pp"])
def test_a_step_does_not_synchronize(name: str, accumulate: bool, two_fake_ranks: None) -> None:
    strategy = {
        "ddp": fixed(0),
        "zero3": fixed(3),
        "tp": fixed(0, tp=2),
        "pp": fixed(0, pp=2, micro_batches=1),
        "interleaved pp": fixed(0, pp=2, micro_batches=2),
    }[name]
    with pretend_accelerator():
        found = syncs(strategy, accumulate)
    assert not found, found[0]


def test_the_modes_see_what_synchronizes(two_fake_ranks: None) -> None:
    """On the host itself, autopar reads each batch and the gradient of the loss."""
    assert syncs(fixed(0), accumulate=False)


# -- verdicts that come a call late ------------------------------------------------------------


@pretend_accelerator()
def differ_once(rank: int, world_size: int, training: bool, strategy: Any) -> None:
    """The ranks differ in the first batch alone."""
    case = MODELS["gpt"]
    model = autopar.compile(case.make(), strategy=strategy)
    loss = model(*case.batch(4, rank)[0])
    loss.backward()
    model.train(training)
    with torch.set_grad_enabled(training):
        model(*case.batch(4, 7)[0])


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("strategy", [fixed(3), fixed(0, tp=2), fixed(0, pp=2, micro_batches=2)])
def test_batches_that_differ_are_told_a_call_late(training: bool, strategy: Any) -> None:
    answers = run(differ_once, 2, training=training, strategy=strategy, expect_errors=True)
    for answer in answers:
        assert isinstance(answer, Raised), answer
        assert "different batches in the call before" in answer.message, answer


@pretend_accelerator()
def part_late(rank: int, world_size: int) -> None:
    """A rank changes its copy of a parameter."""
    case = MODELS["gpt"]
    model = autopar.compile(case.make(), strategy=fixed(0))
    with torch.no_grad():
        for parameter in model.parameters() if rank else ():
            parameter.add_(1.0)
    for step in range(2):
        model(*case.batch(4, step)[0]).backward()


def test_replicas_that_part_are_told_a_call_late() -> None:
    for answer in run(part_late, 2, expect_errors=True):
        assert isinstance(answer, Raised), answer
        assert "their copies have parted" in answer.message, answer


class OnCuda(torch.Tensor):
    is_cuda = True


def test_numbers_of_cuda_come_through_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    order = Mock()
    empty = torch.empty

    def pinned(shape: Any, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        return empty(shape, dtype=dtype)

    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(torch.cuda, "Event", lambda: order)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the stream of the copy")
    late = LateNumbers(torch.tensor([3, 5]).as_subclass(OnCuda))
    order.record.assert_called_once_with("the stream of the copy")
    order.synchronize.assert_not_called()
    assert late.read() == [3, 5]
    order.synchronize.assert_called_once_with()


def test_hashes_tell_single_elements_and_their_order() -> None:
    values = torch.randn(300, dtype=torch.bfloat16)
    others = [values.clone() for _ in range(3)]
    others[1][7] += 0.5
    others[2][[4, 5]] = others[2][[5, 4]]
    hashes = [int(batch_checks._device_hash(x)) for x in (values, *others)]
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3
