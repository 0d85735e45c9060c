"""Benchmarks: one driver over the operators, every contender checked before it is timed."""
