"""Fast paths. Each equals a plain one, behind one dispatch: numba loops for CPUs, Triton kernels for GPUs."""
