"""A version's weights from a closed round's deltas."""
