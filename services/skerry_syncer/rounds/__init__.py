"""When rounds open and close: pure decisions on the log and the leases."""
