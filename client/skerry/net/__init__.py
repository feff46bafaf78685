"""Calls to the syncer: transport, replicas, TLS, retries, and the thread that makes them."""
