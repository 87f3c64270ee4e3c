"""Many requests on one engine: continuous batching, a queue in a thread, and an HTTP server around it."""

from failfast_jax.serving.queue import Queue as Queue
