"""How long a learner takes to join a run, and to come back after it was killed."""
