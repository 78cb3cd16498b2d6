"""Ranks that bring tensors of other sizes under batch="local", such as packed rows.

Each rank then has a program of its own for a call. Programs are made together, since captures are
compared, and must communicate alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from autopar.core.common.notices import warn_once
from autopar.core.ir.graph import TrainingGraph, tensors
from autopar.errors import NumericsWarning
from autopar.runtime.agreement.channel import channel
from autopar.runtime.agreement.consensus import assert_same_across_ranks

SIZES_ADVICE = (
    "Ranks that bring tensors of other sizes must reduce the same values in the same order: let "
    "nothing in forward depend on sizes but shapes, or pad to one length (autopar.pad_to_bucket)."
)

RECOMPUTE_ADVICE = (
    "Ranks whose parts of a tensor are uneven may compute other messages again: give "
    'recompute="full", which keeps what was received, or sizes that the ranks divide.'
)


def have_all(present: bool) -> bool:
    """Whether every rank has something; all ranks call this at once."""
    opened = channel()
    if opened is None:
        return present
    # A sample, not an entry: ranks that differ in an entry raise, and here they may differ.
    opened.start_exchange("looks for its program of a call", samples=[int(present)])
    exchanged = opened.finish_exchange()
    assert exchanged is not None
    return all(own[0] for own in exchanged.samples)


def check_collectives(graphs: Iterable[TrainingGraph], advice: str, stage: object = "") -> None:
    """Checks that ranks of a pipeline's stage communicate alike; all ranks call this at once.

    Raises:
        DisagreementError: they do not.
    """
    lines = [
        f"{node.target} {[t.dtype for t in tensors(node)]}"  # shards have the sizes of their rank
        for graph in graphs
        for node in graph.graph.nodes
        if getattr(node.target, "namespace", "") == "_c10d_functional"
    ]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    assert_same_across_ranks({"order of messages": digest}, advice, stage)


def warn_of_other_sizes(model: str, is_apart: bool) -> None:
    """Says what ranks with tensors of other sizes train, unless they compute apart anyway."""
    if not is_apart:
        warn_once(
            NumericsWarning,
            f"the arguments of {model} have other sizes on other ranks, such as packed rows of "
            "other lengths: from now on each rank computes what it would of its own arguments "
            "alone, and losses and gradients are averaged, as under DistributedDataParallel. For "
            "the mean over all tokens return the sum over this rank's, times the number of ranks "
            "by the number of all ranks' tokens, or pad rows to one length.",
        )
