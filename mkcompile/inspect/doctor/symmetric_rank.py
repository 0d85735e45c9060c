"""One of the two processes that try symmetric memory: `python -m mkcompile.inspect.doctor.symmetric_rank RANK FILE`."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

WORLD_SIZE = 2
_ELEMENTS = 1024


def try_rank(rank: int, init_file: str) -> None:
    """Write this rank's number into the peer's buffer; find the peer's number in one's own."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{init_file}", rank=rank, world_size=WORLD_SIZE)
    buffer = symmetric_memory.empty(_ELEMENTS, dtype=torch.float32, device=device)
    group = dist.group.WORLD
    assert group is not None
    handle = symmetric_memory.rendezvous(buffer, group)
    handle.barrier()
    handle.get_buffer(1 - rank, [_ELEMENTS], torch.float32).fill_(float(rank + 1))
    handle.barrier()
    torch.cuda.synchronize()
    seen = set(buffer.tolist())
    assert seen == {float(2 - rank)}, f"wrote {2 - rank} into rank {rank}'s memory, read {sorted(seen)[:4]}"
    dist.destroy_process_group()


def main(argv: list[str]) -> int:
    """Exit status 0, or 1 with the error as JSON on the last line."""
    try:
        try_rank(int(argv[0]), argv[1])
    except (RuntimeError, AssertionError) as error:
        text = str(error).splitlines() or [type(error).__name__]
        sys.stdout.write(json.dumps({"error": text[0]}) + "\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
