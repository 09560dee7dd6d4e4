"""Under DDP, with a real torchrun: implicit layers keep workers together; explicit ones say that they cannot yet."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os, torch, torch.distributed as dist, torch.nn.functional as F, prong
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
optimizer = prong.PRONG(model, 0.05, eps=0.1, period=4, samples=32)
torch.manual_seed(1 + dist.get_rank())  # every worker has data of its own
for _ in range(10):
    optimizer.zero_grad()
    F.cross_entropy(model(torch.randn(16, 6) + 1), torch.randint(3, (16,))).backward()
    optimizer.step()
mine = torch.cat([p.detach().flatten() for p in model.parameters()])
everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
dist.all_gather(everyone, mine)
assert all(torch.equal(mine, other) for other in everyone)
try:
    prong.PRONG(nn.Linear(3, 2), 0.1, form="explicit")
except NotImplementedError as error:
    assert "implicit" in str(error)
else:
    raise AssertionError("explicit layers must refuse several workers")
print("together", flush=True)
dist.barrier()
os._exit(0)  # gloo's threads sometimes abort an orderly exit on a busy machine; that is not what is tested
"""


def test_workers_with_their_own_data_keep_the_same_parameters(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("together") == 2
