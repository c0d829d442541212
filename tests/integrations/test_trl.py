"""TRL's SFTTrainer with adapters of PEFT."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from integrations._promises import check_example

if not all(map(importlib.util.find_spec, ("trl", "peft"))):
    pytest.skip("TRL and PEFT are not installed", allow_module_level=True)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_example(ranks: int, tmp_path: Path) -> None:
    check_example("with_trl", folder=tmp_path, examples=96, saved_at=30, ranks=ranks)
