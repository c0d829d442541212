"""Balanced data ordering under FSDP2 (`fully_shard`).

    torchrun --nproc-per-node=4 examples/fsdp.py

Runs on CPUs with gloo as it stands, and on GPUs with NCCL unchanged. The lines marked `cdgrab` are all it takes.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import cdgrab  # cdgrab


def main() -> None:
    """Train a small classifier for a few epochs."""
    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))

    torch.manual_seed(0)  # the same data and the same model on every rank
    inputs = torch.randn(2000, 32)
    dataset = TensorDataset(inputs, (inputs @ torch.randn(32, 5)).argmax(1))
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 5)).to(device)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    ordering = cdgrab.Ordering(dataset, batch_size=8, seed=0, group=mesh["dp"])  # cdgrab
    loader = DataLoader(dataset, batch_size=8, sampler=ordering.sampler)  # was: DistributedSampler(dataset)
    ordering.attach(model)  # cdgrab

    for epoch in range(5):
        total = torch.zeros((), device=device)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            mean = float(total) / len(loader) / dist.get_world_size()
            print(f"epoch {epoch}: loss {mean:.4f}, imbalance {ordering.metrics()['imbalance']:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
