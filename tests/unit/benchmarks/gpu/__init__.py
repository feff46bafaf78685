"""Tests of the GPU's benchmark."""
