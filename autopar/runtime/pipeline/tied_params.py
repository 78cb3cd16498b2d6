"""Transfers of parameters, and their gradients, that stages of several ranks use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import distributed as dist

from autopar.runtime.pipeline.compiled_call import CompiledPipelineCall


def send_tied_params(
    compiled: CompiledPipelineCall, parameters: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Sends parameters from their owners to the ranks that use them.

    Args:
        compiled: the call.
        parameters: local parts of this rank's parameters, by name.

    Returns:
        The received parameters, by name.
    """
    received, transfers = {}, []
    for tied in compiled.tied_params:
        if compiled.pp_rank == tied.owner:
            value = parameters[tied.name].contiguous()
            transfers += [dist.isend(value, group=compiled.group, group_dst=u) for u in tied.users]
        elif compiled.pp_rank in tied.users:
            fake = compiled.fake_param(tied.name)
            value = torch.empty(fake.shape, dtype=fake.dtype, device=compiled.device)
            received[tied.name] = value
            transfers.append(dist.irecv(value, group=compiled.group, group_src=tied.owner))
    _wait(transfers)
    return received


def reduce_tied_grads(
    compiled: CompiledPipelineCall,
    parameters: Mapping[str, torch.Tensor],
    gradients: dict[str, torch.Tensor],
) -> None:
    """Sends gradients of tied parameters to their owners, which add them up.

    Args:
        compiled: the call.
        parameters: local parts of this rank's parameters, by name.
        gradients: local gradients, by name; changed in place.
    """
    received, transfers = [], []
    for tied in compiled.tied_params:
        name = tied.name
        if compiled.pp_rank == tied.owner:
            for user in tied.users:
                if compiled.trains(name, user):
                    value = torch.empty_like(
                        parameters[name], memory_format=torch.contiguous_format
                    )
                    transfers.append(dist.irecv(value, group=compiled.group, group_src=user))
                    received.append((name, value))
        elif compiled.pp_rank in tied.users and compiled.trains(name, compiled.pp_rank):
            value = gradients.pop(name).contiguous()
            transfers.append(dist.isend(value, group=compiled.group, group_dst=tied.owner))
    _wait(transfers)
    for name, value in received:
        gradients[name] = gradients[name] + value if name in gradients else value


def _wait(transfers: Sequence[dist.Work | None]) -> None:
    for transfer in transfers:
        assert transfer is not None
        transfer.wait()
