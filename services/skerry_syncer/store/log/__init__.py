"""The run log: its entries, their fold into a run's state, and the checks that admit an item."""
