"""A copy holds the state of its moment, in the buffers of the copy before."""

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict

from autopar._torch import local_tensor
from autopar.train.checkpoints.host_copy import HostCopy
from autopar.train.checkpoints.named_state import OPTIONS, NamedState
from autopar.train.checkpoints.training_state import TrainingState
from tests.harness.models import MODELS
from tests.harness.training import fixed
from tests.harness.worlds import run
from tests.train.checkpoints.test_checkpointer import make


def test_later_copies_reuse_buffers_and_hold_the_state_of_their_moment() -> None:
    weight, rows = torch.ones(3, 2), [1, 2]
    state = {"w": weight, "tied": weight.T, "deep": {"rows": rows, "lr": 0.1}, "pair": (weight[0],)}
    copier = HostCopy()
    first = copier.take(state)
    weight.add_(1)
    rows.append(3)
    assert first["w"].equal(torch.ones(3, 2))
    assert first["tied"].equal(torch.ones(2, 3))
    assert first["deep"] == {"rows": [1, 2], "lr": 0.1}

    second = copier.take(state)
    assert second["w"].data_ptr() == first["w"].data_ptr()
    assert second["w"].equal(weight)
    assert second["tied"].equal(weight.T)
    assert second["pair"][0].equal(weight[0])
    assert second["deep"]["rows"] == [1, 2, 3]

    for other in (torch.zeros(4), torch.zeros(4, dtype=torch.float64), torch.eye(3).to_sparse()):
        assert copier.take({"w": other})["w"].to_dense().equal(other.to_dense())


def named_alike(rank: int, world_size: int) -> None:
    model, optimizer, schedule = make(fixed(3), "gpt")
    named = NamedState(model, [optimizer])
    for step in range(3):
        model(*MODELS["gpt"].batch(4, step)[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        own, wanted = named.now(), get_state_dict(model, optimizer, options=OPTIONS)
        for mine, theirs in zip(own, wanted, strict=True):
            assert mine.keys() == theirs.keys()
            for key, value in mine.items():
                if isinstance(value, Tensor):
                    assert type(value) is type(theirs[key])
                    assert local_tensor(value).data_ptr() == local_tensor(theirs[key]).data_ptr()
                else:
                    assert value == theirs[key], key
    copied, state = HostCopy().take({"model": own[0]})["model"], own[0]
    for key, value in copied.items():
        assert value.placements == state[key].placements
        assert value.full_tensor().equal(state[key].full_tensor())


def test_kept_names_lead_to_what_torch_finds() -> None:
    run(named_alike, 2)


def test_names_are_found_anew_where_the_optimizer_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(*arguments: object, **options: object) -> object:
        calls.append(1)
        return get_state_dict(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("autopar.train.checkpoints.named_state.get_state_dict", counted)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    state = TrainingState(model, [optimizer])

    def names() -> set[str]:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return set(state.tensors()["optimizer"])

    before = names()
    optimizer.param_groups[0]["lr"] = 0.2
    assert names() == before
    assert state.tensors()["optimizer"]["param_groups.0.weight.lr"] == 0.2
    assert len(calls) == 1
    optimizer.add_param_group({"params": [model[1].weight]})
    assert "state.1.weight.momentum_buffer" in names() - before
    assert len(calls) == 2
    # bias of the second layer is in no optimizer, its weight is in the model all the same
    assert set(state.tensors()["model"]) == {"0.weight", "0.bias", "1.weight", "1.bias"}
