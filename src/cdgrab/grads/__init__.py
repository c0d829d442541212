"""Gradients as rows: reading them from a model, and what of them is balanced."""
