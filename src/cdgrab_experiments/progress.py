"""What is seen while runs are under way: bars with loss and time left, and the comparison as it stands."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from cdgrab_experiments.config import RunConfig
from cdgrab_experiments.records import EpochRecord


class Board:
    """A live display of runs.

    Args:
        console: Where to draw. Where there is no terminal, a line is printed for every run instead.
        todo: All runs there will be.
    """

    def __init__(self, console: Console, todo: list[RunConfig]) -> None:
        self._console = console
        self._todo = todo
        self._seen: dict[RunConfig, list[EpochRecord]] = {}
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("epochs"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=console,
        )
        self._bar = self._bars.add_task("starting", total=sum(config.epochs for config in todo))
        self._live = Live(self._bars, console=console, transient=True, refresh_per_second=4)

    def __enter__(self) -> Board:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def epoch(self, config: RunConfig, record: EpochRecord) -> None:
        """Show an epoch of a run."""
        self._seen.setdefault(config, []).append(record)
        what = f"{config.title}, seed {config.seed}, {config.contender}"
        self._bars.update(
            self._bar, description=f"{what} loss {record.loss:.4f}", advance=0 if record.epoch == 0 else 1
        )
        if self._console.is_terminal:
            self._live.update(Group(self._bars, self._standing(config.setting)))

    def finished(self, config: RunConfig, *, there: bool) -> None:
        """Say that a run is complete."""
        last = self._seen[config][-1]
        how = "was there already" if there else f"{last.seconds:.1f} s"
        if not self._console.is_terminal:
            self._console.print(
                f"{config.title}, seed {config.seed}, {config.contender}: loss {last.loss:.6f} after {last.epoch} "
                f"epochs, {how}",
                highlight=False,
                soft_wrap=True,
            )

    def _standing(self, setting: RunConfig) -> Table:
        """Mean loss of every order over its seeds, at the last epoch all of them have reached."""
        here = {config: seen for config, seen in self._seen.items() if config.setting == setting and seen}
        table = Table(box=None, padding=(0, 2), title_justify="left")
        table.add_column(setting.title)
        for column in ("seeds", "epoch", "loss", "seconds"):
            table.add_column(column, justify="right")
        for contender in dict.fromkeys(config.contender for config in here):
            seen = [records for config, records in here.items() if config.contender == contender]
            epoch = min(records[-1].epoch for records in seen)
            at = [next(record for record in records if record.epoch == epoch) for records in seen]
            mean = sum(record.loss for record in at) / len(at)
            seconds = sum(record.seconds for record in at) / len(at)
            table.add_row(contender, str(len(at)), str(epoch), f"{mean:.5f}", f"{seconds:.1f}")
        return table
