"""The gRPC services: messages in, calls of the domain, messages out."""
