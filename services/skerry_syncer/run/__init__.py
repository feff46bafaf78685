"""A replica's work on its runs."""
