"""Object storage: the interface that the store needs, its implementations, and exact put-if-absent."""
