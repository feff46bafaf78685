"""Benchmarks: `python -m benchmarks.<name>` measures, prints a table and writes build/benchmarks/<name>.json."""
