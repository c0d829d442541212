"""Runs example programs in processes of their own, and brings back what they printed and which examples they loaded.

Executed as a program, it is such a process: it runs programs one after the other, so that libraries are imported once.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils.data._utils.fetch import _MapDatasetFetcher

EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass(frozen=True)
class Run:
    """A program that has been run.

    Attributes:
        printed: The lines that say how an epoch went, of the first rank.
        batches: The dataset indices of every batch that was loaded, rank by rank.
    """

    printed: list[str]
    batches: list[list[list[int]]]

    def epochs(self, examples: int) -> list[list[int]]:
        """What all ranks together loaded, epoch by epoch of so many examples."""
        steps = zip(*self.batches, strict=True)
        loaded = [index for step in steps for batch in step for index in batch]
        return [loaded[start : start + examples] for start in range(0, len(loaded), examples)]


def run_in_turn(*programs: list[str], ranks: int = 1, timeout: float = 120) -> list[Run]:
    """Run programs (a path and its arguments) on so many processes, as torchrun would start them."""
    with tempfile.TemporaryDirectory() as folder:
        calls = list(zip(_free_ports(len(programs)), programs, strict=True))
        processes = [_start(json.dumps(calls), rank, ranks, Path(folder)) for rank in range(ranks)]
        try:
            said = [process.communicate(timeout=timeout)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        assert not any(process.returncode for process in processes), "\n".join(said)
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]
    return [Run(found[0][k]["printed"], [of_rank[k]["batches"] for of_rank in found]) for k in range(len(programs))]


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for free in sockets:
            free.bind(("127.0.0.1", 0))
        return [int(free.getsockname()[1]) for free in sockets]


def _start(calls: str, rank: int, ranks: int, folder: Path) -> subprocess.Popen[str]:
    launched = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_RUN_ID": "test",
    }
    quiet = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false"}
    return subprocess.Popen(
        [sys.executable, __file__, str(folder / f"{rank}.json"), calls],
        env={**os.environ, **quiet, **(launched if ranks > 1 else {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _forget_the_last_program() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def _main(path: str, calls: str) -> None:
    found, plain = [], _MapDatasetFetcher.fetch
    for port, sys.argv in json.loads(calls):
        os.environ["MASTER_PORT"] = str(port)
        batches: list[list[int]] = []

        def fetch(self: Any, indices: Any, batches: list[list[int]] = batches) -> Any:
            batches.append(list(indices))
            return plain(self, indices)  # type: ignore[no-untyped-call]

        _MapDatasetFetcher.fetch = fetch  # type: ignore[method-assign]
        with contextlib.redirect_stdout(io.StringIO()) as out:
            runpy.run_path(sys.argv[0], run_name="__main__")
        _forget_the_last_program()
        printed = re.findall(r"^epoch \d+: .*", out.getvalue(), flags=re.MULTILINE)
        found.append({"printed": printed, "batches": batches})
    Path(path).write_text(json.dumps(found))


if __name__ == "__main__":
    _main(*sys.argv[1:])
