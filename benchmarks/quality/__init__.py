"""How well islands learn, against one place and against one island alone: real training in virtual time."""
