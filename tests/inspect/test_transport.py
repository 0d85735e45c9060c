"""`explain` names what carries each site's data, by how the site's group lies on nodes."""

from __future__ import annotations

from io import StringIO

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh

import mkcompile
from mkcompile.config import Settings
from mkcompile.inspect import transport
from mkcompile.inspect.offline import fake_world
from mkcompile.inspect.report import Report
from mkcompile.passes.reason import Reason

ON_TWO_NODES = {"mkernel.topology": "2x8xh200"}


def reductions(x: Tensor, w: Tensor, groups: list[str]) -> list[Tensor]:
    return [funcol.all_reduce(x @ w, "sum", group) for group in groups]


def explained(groups: list[str]) -> Report:
    x, w = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((16384, 4096), (4096, 8192)))
    return mkcompile.explain(reductions, x, w, groups, options=ON_TWO_NODES)


def test_axes_of_a_mesh_go_by_nvlink_by_network_or_by_both() -> None:
    with fake_world(16):
        mesh = init_device_mesh("cpu", (2, 2, 4), mesh_dim_names=("dp", "cp", "tp"))
        names = [mesh[axis].get_group().group_name for axis in ("dp", "cp", "tp")]
        odd = dist.new_group([8, 0, 1, 9]).group_name
        report = explained([*names, dist.group.WORLD.group_name, odd])
    assert [one.transport for one in report.collectives] == [
        "network", "NVLink", "NVLink", "NVLink + network", "NVLink + network",
    ]  # fmt: skip
    spans = [(one.problem.num_nodes, one.problem.per_node) for one in report.collectives if one.problem]
    assert spans == [(2, 1), (0, 0), (0, 0), (2, 8), (2, 2)]
    console = Console(file=StringIO(), width=200)
    report.print(console)
    assert "NVLink + network" in console.file.getvalue()  # type: ignore[attr-defined]
    assert report.to_dict()["collectives"][0]["transport"] == "network"


def test_a_group_with_more_ranks_on_one_node_is_kept_with_a_reason() -> None:
    with fake_world(16):
        report = explained([dist.new_group([0, 1, 2, 8]).group_name])
    (one,) = report.collectives
    assert one.reason is Reason.UNEVEN_NODES
    assert one.estimate is not None and "4 ranks on 2 nodes" in one.estimate.decision
    assert one.transport == "NVLink + network"


@pytest.mark.parametrize(("asked", "named"), [("tcp:eth1", "network:tcp"), ("rc:mlx5_0", "network:rc")])
def test_the_network_that_is_set_is_named(asked: str, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "settings", lambda: Settings(network=asked))
    with fake_world(16):
        group = dist.new_group([0, 8]).group_name
        assert transport.transport_of("2x8xh200", group, rehearsed=False) == named
        assert transport.transport_of("16x8xh200", dist.group.WORLD.group_name, rehearsed=False) == f"NVLink + {named}"
