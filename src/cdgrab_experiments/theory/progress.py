"""A bar that shows where an experiment is."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from cdgrab_experiments.theory.watch import Watch


class Bar(Watch):
    """A watch that shows what it is told."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self.progress = Progress(*columns, console=console, transient=True)
        self._task: TaskID | None = None
        self._what = ""

    def begin(self, what: str, total: int) -> None:
        if self._task is not None:
            self.progress.remove_task(self._task)
        self._what = what
        self._task = self.progress.add_task(what, total=total)

    def step(self, detail: str = "") -> None:
        if self._task is not None:
            what = f"{self._what}: {detail}" if detail else self._what
            self.progress.update(self._task, description=what, advance=1)
