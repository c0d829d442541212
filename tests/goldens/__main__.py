"""Runs the cases: `python -m goldens NAME`, in `tests`. Prints what they leave, as JSON.

numba, plain    in one process, with compiled loops or without
all             everything, for `goldens.json`, where a definition has changed
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import torch

from goldens._cases import ALONE, ON_RANKS, run_all


def main() -> None:
    torch.set_num_threads(1)
    logging.getLogger("cdgrab").setLevel(logging.ERROR)
    if "all" in sys.argv:
        from distributed._ranks import run_ranks

        alone = {f"alone: {name}": found for name, found in run_all(ALONE).items()}
        ranks = {
            f"{size} ranks: {name}": found
            for size in (2, 4)
            for name, found in run_ranks(size, run_all, ON_RANKS, size)[0].items()
        }
        lines = []
        for name, found in (alone | ranks).items():
            del found["resumed"]  # which is held against the run itself
            lines.append(f"{json.dumps(name)}: {json.dumps(found)}")
        print("{\n" + ",\n".join(lines) + "\n}")
        return
    if "plain" in sys.argv:
        modules: dict[str, Any] = vars(sys)["modules"]
        modules["numba"] = None  # as if it were not installed
    print(json.dumps(run_all(ALONE)))


if __name__ == "__main__":
    main()
