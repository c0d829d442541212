"""Sums over units whose optimum is known, or whose gradient is cheap: a file each."""
