from __future__ import annotations

import torch
from hypothesis import settings

# The machine may be shared and slow; a limit per example would only make tests flicker.
settings.register_profile("cdgrab", deadline=None, derandomize=True)
settings.load_profile("cdgrab")

# Two threads that wait for each other on a busy machine are far slower than one.
torch.set_num_threads(1)
