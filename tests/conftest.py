"""Settings that all tests share."""

from __future__ import annotations

import torch

# Two cores, tiny tensors: more threads only wait for each other (an order of magnitude on a busy machine).
torch.set_num_threads(1)
