"""Skerry beside other systems that synchronise a model: the same model, the same link, in turns."""
