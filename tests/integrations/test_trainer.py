"""The Hugging Face Trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from integrations._promises import check_example

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import Trainer, TrainingArguments  # noqa: E402

from cdgrab.integrations.transformers import BalancedOrder  # noqa: E402


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_example(ranks: int, tmp_path: Path) -> None:
    straight = check_example("with_trainer", folder=tmp_path, examples=480, saved_at=80, ranks=ranks)
    assert len(straight.batches[0]) == 4 * 60 // ranks


class Words(nn.Module):
    """Sentences of different lengths, which a collator pads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4, 2)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.head(self.embedding(ids).mean(1)), labels)}


SENTENCES: Any = [{"ids": [1 + k % 7] * (1 + k % 5), "labels": k % 2, "unused": "text"} for k in range(22)]


def padded(items: list[dict[str, Any]]) -> dict[str, Tensor]:
    longest = max(len(item["ids"]) for item in items)
    assert all(item.keys() == {"ids", "labels"} for item in items)  # the Trainer has removed the unused column
    ids = [item["ids"] + [0] * (longest - len(item["ids"])) for item in items]
    return {"ids": torch.tensor(ids), "labels": torch.tensor([item["labels"] for item in items])}


def trainer_in(folder: Path, callback: BalancedOrder, dataset: Any = SENTENCES, **options: Any) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(folder),
        **{
            "num_train_epochs": 3,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 4,  # does not divide the 6 batches of an epoch
            "learning_rate": 0.01,
            "logging_steps": 1,
            "save_steps": 3,  # in the middle of epoch 1
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
            **options,
        },
    )
    return Trainer(Words(), arguments, train_dataset=dataset, data_collator=padded, callbacks=[callback])


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("ignores", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_padding_unused_columns_and_an_epoch_that_accumulation_does_not_divide(
    ignores: bool, workers: int, tmp_path: Path
) -> None:
    more = {"ignore_data_skip": ignores, "dataloader_num_workers": workers}
    if ignores:
        more["gradient_accumulation_steps"] = 1
    callback = BalancedOrder()
    straight = trainer_in(tmp_path, callback, **more)
    straight.train()
    assert callback.ordering is not None
    assert (callback.ordering.epoch, callback.ordering.examples_left) == (3, 22)
    again = BalancedOrder()
    resumed = trainer_in(tmp_path, again, **more)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert losses(resumed) == losses(straight)
    assert again.ordering is not None
    assert again.ordering.order.tolist() == callback.ordering.order.tolist()


def test_figures_come_once_an_epoch(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, BalancedOrder(), logging_steps=2, save_steps=6)
    trainer.train()
    for history in (
        trainer.state.log_history,
        json.loads((tmp_path / "checkpoint-6" / "trainer_state.json").read_text())["log_history"],
    ):
        found = [entry for entry in history if "cdgrab/imbalance" in entry]
        assert [entry["cdgrab/epoch"] for entry in found] == [0, 1, 2]
        assert [entry["epoch"] for entry in found] == [1, 2, 3]


def test_the_model_is_left_as_it_was(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, BalancedOrder())
    trainer.train()
    assert trainer.model is not None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in trainer.model.modules())


def test_a_checkpoint_may_have_been_moved(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    first = trainer_in(here, BalancedOrder(seed=5))
    first.train()
    (here / "checkpoint-3").rename(there)
    lost = trainer_in(here, BalancedOrder(seed=5))
    with pytest.raises(ValueError, match=r"resumes at step 3, and the order at that step is not in .*checkpoint-3"):
        lost.train(resume_from_checkpoint=str(there))
    other = trainer_in(here, BalancedOrder(seed=6), learning_rate=0.02)
    other.train()  # leaves another checkpoint-3
    with pytest.raises(ValueError, match=r"name the checkpoint: BalancedOrder\(checkpoint=\.\.\.\)"):
        trainer_in(here, BalancedOrder(seed=5)).train(resume_from_checkpoint=str(there))
    named = trainer_in(here, BalancedOrder(seed=5, checkpoint=there))
    named.train(resume_from_checkpoint=str(there))
    assert losses(named) == losses(first)


def test_what_cannot_be_balanced(tmp_path: Path) -> None:
    long: Any = [{"input_ids": item["ids"], "labels": 0} for item in SENTENCES]
    grouped = trainer_in(tmp_path, BalancedOrder(), long, train_sampling_strategy="group_by_length")
    with pytest.raises(ValueError, match="the loader has LengthGroupedSampler, whose choice of examples would be lost"):
        grouped.train()
    streamed: Any = type("Streamed", (torch.utils.data.IterableDataset,), {"__iter__": lambda _: iter(SENTENCES)})()
    with pytest.raises(ValueError, match=r"Streamed is an iterable-style \(streaming\) dataset.*materialise"):
        trainer_in(tmp_path, BalancedOrder(), streamed, max_steps=4).train()
