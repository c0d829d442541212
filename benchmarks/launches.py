"""How often does a program on several ranks end badly? Launches it many times and counts.

    python -m benchmarks.launches [--program examples/ddp.py] [--ranks 4] [--count 200]

Every launch is new processes, which run the program from its first line to the end of Python, as under torchrun. They
are forked from a server that has imported PyTorch, so that a launch takes seconds less.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
import time
from pathlib import Path

_context = multiprocessing.get_context("forkserver")
PATIENCE = 120  # seconds for a launch


def _rank(program: str, rank: int, size: int, port: int, output: str) -> None:
    with Path(output).open("w", buffering=1) as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    import torch

    torch.set_num_threads(1)
    runpy.run_path(program, run_name="__main__")


def launch(program: str, size: int, folder: Path) -> list[int | None]:
    """Exit codes of the ranks; what they printed lies in the folder."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        _context.Process(target=_rank, args=(program, rank, size, port, str(folder / f"{rank}.txt")))
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + PATIENCE
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
    return [process.exitcode for process in ranks]


def main() -> None:
    """Launch and count; exit status 1 if any launch ended badly."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default="examples/ddp.py")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--count", type=int, default=200)
    options = parser.parse_args()
    _context.set_forkserver_preload(["torch._dynamo", "torch.distributed", "cdgrab"])
    bad = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(options.count):
            codes = launch(options.program, options.ranks, folder)
            if any(codes):
                bad += 1
                print(f"launch {number}: exit codes {codes}", flush=True)
                for rank, code in enumerate(codes):
                    if code:
                        print((folder / f"{rank}.txt").read_text()[-2000:], flush=True)
    print(f"{bad} of {options.count} launches of {options.program} on {options.ranks} ranks ended badly")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
