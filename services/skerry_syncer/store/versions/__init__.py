"""Versions of a fragment: the blobs that hold them, and how a version is rebuilt from blobs."""
