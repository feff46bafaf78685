"""The contract of Skerry as generated protobuf messages and gRPC stubs."""
