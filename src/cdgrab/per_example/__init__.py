"""Gradients of single examples: factors from the layers of a model, made into whole rows or sketches."""
