"""`results_of`: outputs of an autograd function as a loop has them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from autopar._torch import storage_key


def results_of(
    outputs: Sequence[torch.Tensor], trains: Sequence[bool], saved: Iterable[torch.Tensor]
) -> list[torch.Tensor]:
    """The outputs of a function, of which some are trained; a loop may change them in place.

    torch forbids to change a view that was made inside of a function. One of memory that the
    backward reads stays a view: changing it is an error on one device, too.
    """
    results, memory = list[torch.Tensor](), set[int]()
    for output, trained in zip(outputs, trains, strict=True):
        if not trained:  # it may be the tensor that another output trains
            results.append(output.detach())
            continue
        if output._base is not None:
            memory = memory or set(map(storage_key, saved))
            if storage_key(output) not in memory:
                output = output.data
        results.append(output)
    return results
