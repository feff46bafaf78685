"""What Skerry costs and does on a GPU: encoding, steps, programs that train, and what four learners learn."""
