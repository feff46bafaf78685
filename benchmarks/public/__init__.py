"""Learners far apart on a task that everybody knows: nanoGPT on the characters of Shakespeare's plays."""
