"""Hugging Face Trainer, and trainers that build on it (TRL): a callback."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cdgrab.integrations.accelerate import reorder
from cdgrab.integrations.figures import figures
from cdgrab.ordering import Ordering

_FILE = "ordering.pt"


class BalancedOrder(TrainerCallback):
    """Visits examples in a balanced order: `Trainer(..., callbacks=[BalancedOrder()])`.

    Checkpoints have a file `ordering.pt` more. `trainer.train(resume_from_checkpoint=...)` goes on where they were
    saved, with `ignore_data_skip` or without. The figures of an epoch are in the Trainer's log, as `cdgrab/imbalance`
    and so on.

    Args:
        checkpoint: The folder to resume from, if it is neither in `output_dir` nor in the arguments of the Trainer.
        source: As for `Ordering.attach`.
        options: Further arguments of `Ordering`. The seed is the Trainer's.

    Attributes:
        ordering: The ordering, from the begin of training on.
    """

    def __init__(self, *, checkpoint: str | Path | None = None, source: Any = "auto", **options: Any) -> None:
        self.ordering: Ordering | None = None
        self._checkpoint, self._source, self._options = checkpoint, source, options
        self._logged: float = -1

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        model: Any = None,
        train_dataloader: Any = None,
        **_: Any,
    ) -> None:
        """Put the loader into a balanced order, and watch the model."""
        if args.n_gpu > 1:
            raise ValueError(
                f"the Trainer splits batches among {args.n_gpu} GPUs of one process; start a process for each: "
                "torchrun --nproc-per-node=gpu"
            )
        accumulate = args.gradient_accumulation_steps
        self._logged = -1
        options = {"seed": args.seed if args.data_seed is None else args.data_seed, **self._options}
        self.ordering = reorder(train_dataloader, accumulate=accumulate, fetched=accumulate, **options)
        self.ordering.attach(model, source=self._source)
        if state.global_step:
            self._load(args, state)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:  # noqa: ARG002
        """Add the order to a checkpoint that was just written."""
        assert self.ordering is not None
        saved = {"digest": _digest(state), "ordering": self.ordering.state_dict()}
        if args.should_save:
            path = _folder(args, state) / _FILE
            partial = path.with_suffix(".partial")
            torch.save(saved, partial)
            os.replace(partial, path)

    def on_log(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Add the figures of the epoch that has ended, once."""
        found = {} if self.ordering is None else figures(self.ordering)
        if logs is not None and found and found["cdgrab/epoch"] != self._logged:
            self._logged = found["cdgrab/epoch"]
            logs.update(found)
            state.log_history[-1].update(found)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Leave the model as it was."""
        if self.ordering is not None:
            self.ordering.detach()

    def _load(self, args: TrainingArguments, state: TrainerState) -> None:
        """Go on with the order of the checkpoint that the Trainer has resumed from. It does not say which that is."""
        named = self._checkpoint or args.resume_from_checkpoint
        folders = [Path(named)] if isinstance(named, (str, Path)) else []
        paths = [folder / _FILE for folder in [*folders, _folder(args, state)]]
        for path in filter(Path.is_file, paths):
            saved = torch.load(path, weights_only=True)
            if saved["digest"] == _digest(state):
                assert self.ordering is not None
                self.ordering.load_state_dict(saved["ordering"])
                self._logged = max((entry.get("cdgrab/epoch", -1) for entry in state.log_history), default=-1)
                return
        raise ValueError(
            f"the Trainer resumes at step {state.global_step}, and the order at that step is not in "
            f"{' or '.join(map(str, paths))}; name the checkpoint: BalancedOrder(checkpoint=...)"
        )


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    """Where the Trainer saves a checkpoint at this step."""
    return Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"


def _digest(state: TrainerState) -> int:
    """Tells the checkpoint of another run or step."""
    return zlib.crc32(json.dumps([state.global_step, state.log_history], sort_keys=True).encode())


__all__ = ["BalancedOrder"]
