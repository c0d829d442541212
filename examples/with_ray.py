"""Balanced data ordering with Ray Train, on workers of one machine or of many, with restarts.

    python examples/with_ray.py [--lose-a-worker]

The lines marked `cdgrab` are all it takes. A worker that is lost costs what came after the last checkpoint.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
from pathlib import Path

import ray.train.torch
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cdgrab.integrations.ray import balance  # cdgrab


def train(config: dict[str, bool]) -> None:
    """What every worker does."""
    torch.manual_seed(0)  # the same data and the same model on every worker
    inputs, rank = torch.randn(480, 32), ray.train.get_context().get_world_rank()
    data = DataLoader(TensorDataset(inputs, inputs[:, :5].argmax(1)), batch_size=8, shuffle=True)
    model = ray.train.torch.prepare_model(nn.Linear(32, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    ordering, loader = balance(model, data)  # cdgrab
    state = {"model": model, "ordering": ordering}  # cdgrab
    saved = ray.train.get_checkpoint()
    for name, part in torch.load(f"{saved.path}/state.pt").items() if saved else ():
        state[name].load_state_dict(part)
    for epoch in range(ordering.epoch, 4):
        for batch, (x, y) in enumerate(loader):
            if batch == 15:
                with tempfile.TemporaryDirectory() as folder:
                    torch.save({name: part.state_dict() for name, part in state.items()}, f"{folder}/state.pt")
                    ray.train.report({}, checkpoint=None if rank else Checkpoint(folder))
            if config["lose"] and not saved and (rank, epoch, batch) == (1, 2, 20):
                os.kill(os.getpid(), signal.SIGKILL)
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0:
            print(f"epoch {epoch}: last loss {loss:.6f}, imbalance {ordering.metrics()['imbalance']:.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="results/ray")
    parser.add_argument("--lose-a-worker", action="store_true")
    options = parser.parse_args()
    storage = RunConfig(storage_path=str(Path(options.folder).resolve()), failure_config=FailureConfig(max_failures=1))
    loop = {"train_loop_config": {"lose": options.lose_a_worker}, "scaling_config": ScalingConfig(num_workers=2)}
    ray.train.torch.TorchTrainer(train, run_config=storage, **loop).fit()
