"""Number of chunks of an all-to-all on gloo, as lowered, measured and priced.

Gloo writes a whole buffer before it reads from the same rank, so two ranks that exchange 8 MiB take
turns (torch 2.13, medians of 5, ms):

| 8 MiB to each other rank, in chunks | 1 | 2 | 4 | 8 | 16 |
|---|---|---|---|---|---|
| 2 nodes, 1 Gbit/s (the link takes 70) | 140 | 105 | 89 | 83 | 75 |
| 4 nodes, 1 Gbit/s | 317 | 270 | 248 | 273 | 268 |
| 2 nodes, 10 Gbit/s | 13.4 | 12.1 | 9.5 | 8.2 | 13.0 |
| 2 ranks, loopback | 12.6 | 8.8 | 8.5 | 6.7 | 13.6 |
| 4 ranks, loopback | 57 | 40 | 37 | 43 | 48 |

At 2 MiB four chunks are best or close to it everywhere, at 512 KiB two. More cost additional calls.
"""

from __future__ import annotations

CHUNK_BYTES = 256 * 2**10
"""Least bytes of a chunk to one other rank: smaller chunks cost more than they save."""

MAX_CHUNKS = 4


def gloo_chunks(nbytes: int, ranks: int) -> int:
    """The number of chunks of an all-to-all of `nbytes` bytes, as `collectives` defines its size.

    >>> [gloo_chunks(size, ranks=2) for size in (2**18, 2**20, 2**21, 2**24)]
    [1, 2, 4, 4]
    """
    return max(1, min(MAX_CHUNKS, nbytes // ranks // CHUNK_BYTES))
