"""A run in virtual time: the product's fold and round engine, with learners that count steps and do not train."""
