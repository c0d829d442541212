"""Docstrings head their examples "Example:", which griffe takes for a remark, not for code to be shown as such."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Examples(griffe.Extension):  # type: ignore[misc]
    """Lets griffe read "Example:" as "Examples:"."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^(\s*)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
