"""Benchmarks: every figure is a ratio against a rival measured in the same run. Nothing here is a test."""
