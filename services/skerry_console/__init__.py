"""A run in a browser: live from a syncer, or as one file."""
