from __future__ import annotations

from hypothesis import settings

# The machine may be shared and slow; a limit per example would only make tests flicker.
settings.register_profile("cdgrab", deadline=None, derandomize=True)
settings.load_profile("cdgrab")
