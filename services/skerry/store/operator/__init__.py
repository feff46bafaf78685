"""What an operator does with a store without a syncer: verify, export, collect, read the log."""
