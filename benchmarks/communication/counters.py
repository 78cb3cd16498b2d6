"""What this node's interface has sent, read inside the node's namespace."""

from __future__ import annotations

from pathlib import Path

_SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")


def sent_bytes() -> int:
    """Bytes that this node has sent; a large frame counts one header."""
    return int(_SENT.read_text())
