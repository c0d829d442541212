"""Inner products in, signs out: the paper's loop, slow and obvious, and the fast versions that must match it."""
