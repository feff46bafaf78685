"""A model's weights as one flat vector a fragment, whatever framework holds them."""
