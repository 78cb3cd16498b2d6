"""`ARCHITECTURES`: every architecture of the benchmark, by name."""

from __future__ import annotations

from benchmarks.architectures.drawn import DRAWN
from benchmarks.architectures.language import (
    DECODERS,
    ENCODER_DECODERS,
    ENCODERS,
    EXPERTS,
    STATE_SPACES,
)
from benchmarks.architectures.pictures import AUDIO, DIFFUSION, IMAGE_TEXTS, VISION

_ALL = (DECODERS, EXPERTS, STATE_SPACES, ENCODERS, ENCODER_DECODERS, VISION, AUDIO, IMAGE_TEXTS)

ARCHITECTURES = {each.name: each for kind in (*_ALL, DIFFUSION, DRAWN) for each in kind}
