"""One module for each system. They run in environments of their own, so they import nothing of Skerry but their own."""
