"""Many requests on one engine: continuous batching, a queue in a thread of its own, and a server in front of it."""
