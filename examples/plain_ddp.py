"""A training script like any other: torchrun --nproc-per-node 2 examples/plain_ddp.py"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 30


def main() -> None:
    is_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if is_cuda else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if is_cuda else "cpu"
    if is_cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(rank)
    layers = [layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.GELU())]
    model = DistributedDataParallel(nn.Sequential(*layers).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        x = torch.randn(64, 512, device=device)
        loss = nn.functional.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 10 == 9:
            sys.stdout.write(f"step {step + 1}: loss {loss.item():.4f}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
