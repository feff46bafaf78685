"""How fast the data path is: each figure beside the limit that was measured in the same run."""
