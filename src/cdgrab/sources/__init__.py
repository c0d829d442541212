"""Sources supply the gradients of units. Each is a frozen dataclass of its options, and a line in `SOURCES`.

`batch.py` takes the gradient that a backward pass leaves, in a module (`module.py`), or on several ranks (`ddp.py`,
`fsdp.py`). `examples.py` takes rows or sketches of single examples from the layers of a model. `port.py` defines what a
source may ask of an ordering and tell it. A source of your own needs nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from cdgrab.sources.auto import AutoSource
from cdgrab.sources.batch import BatchSource
from cdgrab.sources.examples import PerExampleSource, SketchSource
from cdgrab.sources.port import Attachment, CountedStep, GradientSource, Port

SOURCES: dict[str, type[GradientSource]] = {
    "auto": AutoSource,
    "batch": BatchSource,
    "per_example": PerExampleSource,
    "sketch": SketchSource,
}
"""The sources by name."""

_GONE = {
    "ghost": "use 'sketch', which keeps nearly all of its gain at less cost, or 'per_example', whose rows are exact",
}


def find_source(source: str | GradientSource, options: Mapping[str, Any]) -> GradientSource:
    """The source with this name and these options. A source object is passed through.

    Example:
        >>> find_source("sketch", {"length": 256})
        SketchSource(reduction='mean', length=256, strict=False)
    """
    if not isinstance(source, str):
        if not callable(getattr(source, "attach", None)) or isinstance(source, type):
            raise ValueError(
                f"source is {source!r}; pass one of {', '.join(map(repr, SOURCES))}, or an object with "
                "attach(port, model)"
            )
        if options:
            raise ValueError(f"{', '.join(options)} given beside a source object; pass them when you make the source")
        return source
    if source in _GONE:
        raise ValueError(f"source {source!r} is gone: {_GONE[source]}")
    if source not in SOURCES:
        raise ValueError(f"unknown source {source!r}; choose one of {', '.join(SOURCES)}")
    make: Any = SOURCES[source]
    known = [field.name for field in fields(make)] if is_dataclass(make) else []
    unknown = [name for name in options if name not in known]
    if unknown:
        others = [name for name, other in SOURCES.items() if {*unknown} <= {field.name for field in fields(other)}]  # type: ignore[arg-type]
        remedy = f"; use source={others[0]!r}" if others else ""
        raise ValueError(
            f"source {source!r} has no option {', '.join(map(repr, unknown))}; it takes {', '.join(known) or 'none'}"
            f"{remedy}"
        )
    found: GradientSource = make(**options)
    return found


__all__ = [
    "SOURCES",
    "Attachment",
    "AutoSource",
    "BatchSource",
    "CountedStep",
    "GradientSource",
    "PerExampleSource",
    "Port",
    "SketchSource",
    "find_source",
]
