"""One learner of many processes, each of which holds all or a shard of the weights."""
