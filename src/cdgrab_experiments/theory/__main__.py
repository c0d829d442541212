"""`python -m cdgrab_experiments.theory NAME`: the same as `cdgrab verify NAME`."""

from __future__ import annotations

import typer

from cdgrab_experiments.theory.cli import verify

if __name__ == "__main__":
    typer.run(verify)
