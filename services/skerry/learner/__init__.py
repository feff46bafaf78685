"""The reference learner: a small GPT in plain PyTorch, its data, and the loop that trains it on one island.

A training loop of your own needs nothing from here, only `skerry.client`; this package shows how the two meet, is what
the containers run, and is what the demo trains.
"""
