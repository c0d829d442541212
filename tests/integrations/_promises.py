"""What every tool's example must keep, in one process and on ranks."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from integrations._programs import EXAMPLES, Run, run_in_turn


def check_example(name: str, *more: str, folder: Path, examples: int, saved_at: int, ranks: int) -> Run:
    """Run an example and once more from its checkpoint, and check what holds for every tool.

    Args:
        name: Of the program in `examples/`.
        more: Further arguments of it.
        folder: For checkpoints.
        examples: The number of examples in its dataset.
        saved_at: The batch of a rank, counted from the start, before which the checkpoint was taken.
        ranks: The number of processes.
    """
    program = [str(EXAMPLES / f"{name}.py"), "--folder", str(folder), *more]
    straight, resumed = run_in_turn(program, [*program, "--resume"], ranks=ranks)
    epochs = straight.epochs(examples)
    every = list(range(examples))
    assert [sorted(epoch) for epoch in epochs] == [every] * len(epochs), "an example was lost or came twice"
    assert len(epochs) >= 3
    for before, after in itertools.pairwise(epochs):
        assert before != after, "the order did not change"
    assert [batches[saved_at:] for batches in straight.batches] == resumed.batches
    assert straight.printed[-len(resumed.printed) :] == resumed.printed
    assert len(resumed.printed) >= 2
    found = [float(value) for line in straight.printed for value in re.findall(r"imbalance ([\d.]+)", line)]
    assert len(found) == len(epochs), "the metrics of every epoch are in the log"
    assert all(0 < value < 1 for value in found)
    return straight
