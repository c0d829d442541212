"""Ctrl-C that is not lost.

Python raises `KeyboardInterrupt` wherever the program happens to be. In a callback, such as those of a garbage
collector or a compiler, it is printed and forgotten, and the program goes on. So a request to stop is also remembered,
and asked for after every epoch.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

_asked = False
_held = False


def interruptible() -> None:
    """From now on Ctrl-C and a request to end mean the same in this process: save and stop.

    Also where a script has started it in the background, for which shells have it ignore Ctrl-C.
    """
    global _asked
    _asked = False
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _ask)
        signal.signal(signal.SIGTERM, _ask)


def stop_if_asked() -> None:
    """Raise `KeyboardInterrupt` if it was asked for and got lost."""
    if _asked:
        raise KeyboardInterrupt


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Let what must be finished be finished: a request to stop waits for the end of the block, and is raised there."""
    global _held, _asked
    before, _asked, _held = _asked, False, True
    try:
        yield
    finally:
        _held = False
        meanwhile, _asked = _asked, _asked or before
    if meanwhile:
        raise KeyboardInterrupt


def _ask(*_: Any) -> None:
    global _asked
    _asked = True
    if not _held:
        raise KeyboardInterrupt
