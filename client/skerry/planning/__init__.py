"""What a run will need: `formulas`, the `figures` that benchmarks measured, and the `plan` that follows from both."""
