"""What every process needs of its machine: clocks, identifiers, worker threads and bounded retries."""
