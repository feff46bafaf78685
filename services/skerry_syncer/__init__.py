"""The syncer: gathers deltas into rounds, merges them and publishes versions; keeps only caches."""
