"""Benchmarks: methods against each other and against plain decoding, drafters, and the engine itself."""
