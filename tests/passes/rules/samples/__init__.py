"""Random calls of every operator that has a rule."""

from tests.passes.rules.samples import layers, pointwise, views
from tests.passes.rules.samples.draw import SAMPLES, draw_operator, loop_strategies

__all__ = ["SAMPLES", "draw_operator", "layers", "loop_strategies", "pointwise", "views"]
