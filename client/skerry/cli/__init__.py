"""The `skerry` command: a client like any other, to which services bring their own commands by entry point."""
