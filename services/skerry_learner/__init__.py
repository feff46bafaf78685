"""The reference learner: a small GPT in plain PyTorch, its data, and its training loop.

Your own training loop needs only `skerry` and nothing from here. This package is an example of using it; the
containers and the demo run it.
"""
