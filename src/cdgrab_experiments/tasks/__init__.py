"""Tasks by name, one file each: a data set, a model, a loss and a metric.

Importing this is cheap: what a task needs beyond torch and NumPy is imported when its data are loaded.
"""

from __future__ import annotations

import difflib

from cdgrab_experiments.tasks import a9a, cifar10, digits, glue, gpt2, hmda, m4, mnist, wikitext2
from cdgrab_experiments.tasks.base import Task

TASKS: dict[str, Task] = {
    module.TASK.name: module.TASK for module in (digits, hmda, a9a, m4, cifar10, mnist, wikitext2, gpt2, glue)
}


def find_task(name: str) -> Task:
    """The task `name`; a name that is not there is answered with the nearest one."""
    if name not in TASKS:
        near = difflib.get_close_matches(name.lower(), TASKS, n=1, cutoff=0.4)
        hint = f", did you mean {near[0]!r}?" if near else ";"
        raise ValueError(f"there is no task {name!r}{hint} there are {', '.join(TASKS)}")
    return TASKS[name]
