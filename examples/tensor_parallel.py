import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
mesh = init_device_mesh(device, (dist.get_world_size(),))
model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256)).to(device)
parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

compiled = torch.compile(model, backend="mkernel", options={"mkernel.fuse": "always"})  # no import of mkcompile
x = torch.randn(64, 256, device=device)
dist.broadcast(x, 0)
with torch.no_grad():
    print(f"rank {dist.get_rank()}: largest difference from eager {(compiled(x) - model(x)).abs().max().item():.2e}")
dist.destroy_process_group()
