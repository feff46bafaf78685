"""A delta's life on the learner: training, a boundary, the push, the pull of the next version, and its adoption."""
