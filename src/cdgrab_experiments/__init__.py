"""Experiments: they use the library and are never used by it. Needs `pip install "cdgrab[experiments]"`."""
