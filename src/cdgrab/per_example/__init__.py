"""Gradients of single examples: from what layers saw (factors) to rows, whole or short."""
