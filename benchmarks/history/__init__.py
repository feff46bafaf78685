"""What a run of many entries costs to open and to hold."""
