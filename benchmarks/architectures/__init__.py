"""Architectures of transformers and diffusers, each under four plans, beside one process."""
