"""Graph passes: each one a frozen value that turns a legal TrainingGraph into the next."""

from autopar.passes.registration import register_pass

__all__ = ["register_pass"]
