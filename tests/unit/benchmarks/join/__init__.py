"""Tests of the rivals' benchmark."""
