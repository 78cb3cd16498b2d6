"""Whatever a loop reads of a sharded tensor, or writes to it, is as on one device."""

import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from autopar.errors import AutoparWarning, DisagreementError, StrategyError
from autopar.runtime.parameters.sharded import ShardedTensor, distribute_replicated
from tests.harness.worlds import run

f64 = torch.float64
VALUES, OTHER = (
    torch.randn(7, 4, dtype=f64, generator=torch.Generator().manual_seed(i)) for i in (0, 1)
)
MASK, ROW, PLACES = OTHER > 0, OTHER[0], torch.tensor([5, 1, 3])

READS: dict[str, Callable[[Any], Any]] = {
    "norm": lambda p: p.norm().item(),
    "norm of order 1": lambda p: p.norm(1).item(),
    "largest": lambda p: p.norm(float("inf")).item(),
    "norms": lambda p: torch.stack([p.norm(), p.norm(1), torch.ones((), dtype=f64)]),
    "norm of columns": lambda p: p.norm(dim=0),
    "sum": lambda p: float(p.sum()),
    "std": lambda p: p.std(),
    "argmax": lambda p: p.argmax(),
    "quantile": lambda p: p.quantile(0.3),
    "any": lambda p: bool((p > 1).any()),
    "equal": lambda p: torch.equal(p, VALUES),
    "close": lambda p: torch.allclose(p, OTHER),
    "lists": lambda p: torch.tensor(p.detach().tolist()),
    "array": lambda p: torch.from_numpy(p.detach().numpy()),
    "element": lambda p: p[5, 2].item(),
    "row": lambda p: p[5],
    "rows": lambda p: [x.sum() for x in p],
    "rows by index": lambda p: p[PLACES],
    "rows by mask": lambda p: p[MASK[:, 0]],
    "elements by own mask": lambda p: p[p > 0],
    "flat": lambda p: nn.utils.parameters_to_vector([p]),
    "transposed": lambda p: p.T @ p,
    "mixed": lambda p: torch.where(MASK, p * OTHER + ROW, 0.0),
    "importance": lambda p: (OTHER * (p - OTHER).square()).sum(),
    "noise": lambda p: p + torch.randn_like(p),
    "dropout": lambda p: F.dropout(p, 0.5),
    "singular values": lambda p: torch.linalg.svdvals(p),
}


def change_then_write_a_view(p: Any) -> None:
    rows, columns = p.data[0], p.detach().t()
    p.add_(1.0)
    rows.mul_(2.0)
    torch._foreach_mul_([p], 3.0)
    columns[0].add_(rows.sum())


WRITES: dict[str, Callable[[Any], Any]] = {
    "normal": lambda p: p.normal_(),
    "orthogonal": nn.init.orthogonal_,
    "noise": lambda p: p.add_(torch.randn_like(p)),
    "plain": lambda p: p.mul_(MASK).add_(ROW),
    "row": lambda p: p[2].zero_(),
    "rows": lambda p: p[1:3].fill_(7),
    "element of a view": lambda p: p.view(-1).__setitem__(3, 9.0),
    "elements by mask": lambda p: p.__setitem__(MASK, 0.0),
    "elements by own mask": lambda p: p.__setitem__(p.abs() > 0.5, 0.0),
    "rows by index": lambda p: p.index_add_(0, PLACES, OTHER[:3]),
    "rows swapped": lambda p: p.__setitem__([0, 6], p[[6, 0]]),
    "all rows": lambda p: [row.mul_(2) for row in p],
    "rows scaled to a norm": lambda p: p.renorm_(2, 0, 0.5),
    "by its norm": lambda p: p.div_(p.norm()),
    "by norms of columns": lambda p: p.div_(p.norm(dim=0, keepdim=True)),
    "data": lambda p: setattr(p, "data", p.data * 0.5),
    "plain data": lambda p: setattr(p, "data", OTHER.clone()),
    "a view from before a change": change_then_write_a_view,
    "a view of data": lambda p: p.data.view(-1).mul_(2),
    "vector": lambda p: nn.utils.vector_to_parameters(OTHER.flatten(), [p]),
}
PENALTIES: dict[str, Callable[[Any], Tensor]] = {
    "L1": lambda p: p.abs().sum(),
    "L2 beside a plain loss": lambda p: p.square().sum() + (ROW * 2).sum(),
    "norm": lambda p: p.norm(),
    "importance": lambda p: (OTHER * (p - OTHER).square()).sum(),
    "orthogonality": lambda p: (p.T @ p - torch.eye(4, dtype=f64)).square().sum(),
    "row": lambda p: p[3].square().sum(),
    "masked": lambda p: p[MASK].square().sum() * p.std(),
}


def same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, list):
        return all(map(same, found, wanted))
    found = found.full_tensor() if isinstance(found, DTensor) else torch.as_tensor(found)
    return torch.allclose(found.to(f64), torch.as_tensor(wanted).to(f64), atol=1e-12)


def use_all(rank: int, world_size: int) -> list[str]:
    """Names of what differs."""
    mesh, wrong = init_device_mesh("cpu", (world_size,)), []
    for dim in (0, 1):

        def both(make: Callable[[Any], Any], dim: int = dim) -> tuple[Any, Any, Any, Any]:
            plain = nn.Parameter(VALUES.clone())
            sharded = nn.Parameter(distribute_replicated(VALUES, mesh, [Shard(dim)]))
            results = []
            for parameter in (plain, sharded):
                torch.manual_seed(0)
                results.append(make(parameter))
            return plain, sharded, *results

        with torch.no_grad():
            for name, read in READS.items():
                _, _, wanted, found = both(read)
                wrong += [] if same(found, wanted) else [f"read {name}"]
            for name, write in WRITES.items():
                plain, sharded, _, _ = both(write)
                is_whole = isinstance(sharded, ShardedTensor) and same(sharded, plain)
                wrong += [] if is_whole else [f"write {name}"]
        for name, penalty in PENALTIES.items():
            plain, sharded, _, _ = both(lambda p, penalty=penalty: penalty(p).backward())
            wrong += [] if same(sharded.grad, plain.grad) else [f"gradient of {name}"]
    return wrong


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_reads_and_writes(world_size: int) -> None:
    assert run(use_all, world_size) == [[]] * world_size


def refuse(rank: int, world_size: int) -> None:
    parameter = nn.Parameter(
        distribute_replicated(VALUES, init_device_mesh("cpu", (world_size,)), [Shard(0)])
    )
    with pytest.raises(StrategyError, match=r"before autopar\.compile"):
        parameter.data = VALUES.T
    with pytest.raises(DisagreementError, match="reads a parameter"):
        parameter.sum().item() if rank == 0 else parameter.detach().norm().item()


def test_a_rank_that_reads_alone() -> None:
    run(refuse, 2)


def copy_alone(rank: int, world_size: int) -> list[int]:
    """Copies a gradient on one rank, as autograd does where something else holds it."""
    mesh = init_device_mesh("cpu", (world_size,))
    gradient = distribute_replicated(VALUES, mesh, [Shard(0)])
    if rank == 0:
        copied = gradient.new_empty_strided(gradient.shape, gradient.stride()).copy_(gradient)
        assert torch.equal(copied.to_local(), gradient.to_local())
        gradient = copied
    assert torch.equal(gradient.full_tensor(), VALUES)
    return list(gradient.shape)


def test_a_rank_that_copies_alone() -> None:
    assert run(copy_alone, 2) == [[7, 4]] * 2


def pickle_alone(rank: int, world_size: int) -> list[str]:
    p = distribute_replicated(VALUES, init_device_mesh("cpu", (world_size,)), [Shard(0)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if rank == 0:
            torch.save({"p": p}, io.BytesIO())
    return [str(w.message) for w in caught if issubclass(w.category, AutoparWarning)]


def test_a_rank_that_pickles_its_part_is_warned() -> None:
    on_rank0, on_rank1 = run(pickle_alone, 2)
    assert len(on_rank0) == 1
    assert "this rank's part of it alone" in on_rank0[0]
    assert not on_rank1
