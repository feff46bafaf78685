"""Tests of the public table."""
