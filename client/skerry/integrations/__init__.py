"""Skerry in the trainers that people use, one module each: `transformers`, `lightning` and `jax`.

A module needs the package that it is called after, and nothing here is imported by anything else. For a loop of one's
own, with or without accelerate, see `skerry.attach`.
"""
