"""The operator's tools, which need a store but no syncer: verify, export, collect, read the log."""
