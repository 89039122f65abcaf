"""Benchmarks: ratios of paired times, and peak memory."""
