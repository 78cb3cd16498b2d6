"""Random calls of every operator that has a rule."""

from tests.passes.rules.samples import layers, pointwise, views
from tests.passes.rules.samples.draw import SAMPLES, draw_operator

__all__ = ["SAMPLES", "draw_operator", "layers", "pointwise", "views"]
