"""Benchmarks: decode speed against other runtimes."""
