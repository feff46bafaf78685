"""What happened in a run, as an observer learns it from the contract."""
