"""Administration of runs."""
