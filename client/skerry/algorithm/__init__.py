"""The mathematics of a run, in the order in which it acts: pure functions over arrays and numbers, without I/O."""
