"""What older releases of PyTorch that are supported cannot do is refused in words."""

from __future__ import annotations

from typing import Any, cast

import pytest
from torch import nn
from torch.distributed.fsdp import FSDPModule

from cdgrab.sources.fsdp import FsdpAttachment


def test_whole_batches_under_fully_shard_need_a_newer_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(FSDPModule, "set_custom_reduce_scatter", raising=False)
    with pytest.raises(ValueError, match=r"need torch 2\.9 or newer, and this is torch \d.*source='sketch'"):
        FsdpAttachment(cast(Any, None), nn.Linear(2, 2))
