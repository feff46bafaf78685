"""The versioned parameter store: a run log over an object store, its pure fold, and the blobs that it names."""
