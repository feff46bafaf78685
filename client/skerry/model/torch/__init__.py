"""The weights of a torch module."""
