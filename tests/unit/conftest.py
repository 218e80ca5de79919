"""One thread for torch: threads that wait for each other take ten times as long where other work has the cores."""

import torch

torch.set_num_threads(1)
