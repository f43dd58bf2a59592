"""DDP on batches of a data set that a sampler shuffles and divides among ranks."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WARM_UPS = 2


def build() -> Callable[[], None]:
    data = TensorDataset(torch.randn(26, 8), torch.arange(26) % 3)
    loader = DataLoader(data, batch_size=3, sampler=DistributedSampler(data))
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        for inputs, labels in loader:
            fn.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()

    return step
