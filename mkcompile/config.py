"""All settings. This is the only module that reads the environment.

`Settings` is what a process has (folders, caps, deadlines); `Options` is what one `torch.compile` call asks for.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Literal, get_args

from mkcompile.errors import OptionError

FusePolicy = Literal["auto", "always", "never"]
ResultPolicy = Literal["ordinary", "planned"]
ResidualPolicy = Literal["in_place", "apart"]
LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]
OPTION_PREFIX = "mkernel."
NETWORKS = ("auto", "tcp", "rc", "srd", "emulated", "unordered")
# What a number is, for whom an example says more than a type.
_NUMBERS = {int: "a whole number, such as 1073741824", float: "a number, such as 30"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Per-process settings, each from one environment variable `MKCOMPILE_<NAME>`.

    Units: `arena_bytes` bytes a group; `timeout_s` seconds (0: the process group's own timeout); `sm_reserve` SMs, the
    most that a launch leaves to other kernels, or what each leaves where `is_sm_reserve_given`, which has no variable.
    `network`: how ranks on different nodes reach each other: `auto`, a transport (`tcp`, `rc`, `srd`), or one with its
    interface or NIC (`tcp:eth1`, `rc:mlx5_0`), or with NICs of which each rank takes the nearest (`rc:mlx5_0,mlx5_1`).
    `node`: the name of the node that this process is on; empty: found out.
    `launches_block`: CUDA_LAUNCH_BLOCKING is set; it has no variable of ours.
    """

    cache_dir: Path = Path("~/.cache/mkcompile")
    arena_bytes: int = 1 << 30
    timeout_s: float = 0.0
    sm_reserve: int = 16
    trace: bool = False
    kernels: bool = True
    log_level: LogLevel = "WARNING"
    network: str = "auto"
    node: str = ""
    is_sm_reserve_given: bool = False
    launches_block: bool = False

    @property
    def transport(self) -> str:
        """`network` without its interface, NIC or, of `emulated`, speed."""
        return self.network.partition(":")[0]

    def __post_init__(self) -> None:
        for name in ("arena_bytes", "timeout_s", "sm_reserve"):
            value = getattr(self, name)
            if not math.isfinite(value):
                raise OptionError(f"MKCOMPILE_{name.upper()} must be finite, got {value}")
            if value < 0:
                raise OptionError(f"MKCOMPILE_{name.upper()} must not be negative, got {value}")
        if self.transport not in NETWORKS:
            raise OptionError(f"MKCOMPILE_NETWORK must name one of {', '.join(NETWORKS)}; got {self.network!r}")
        if self.log_level not in get_args(LogLevel):
            raise OptionError(
                f"MKCOMPILE_LOG_LEVEL must be one of {', '.join(get_args(LogLevel))}; got {self.log_level!r}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What one compile asks for: `options={"mkernel.<name>": value}`.

    `fuse`: `auto` fuses where the planner predicts a gain, `always` wherever it is legal, `never` nowhere.
    `topology`: `probe`, or the name of a preset of `mkcompile.plan.topology`.
    `results`: `planned` lets peers store those of all-reduces that stay in the graph in place, `ordinary` stages all.
    `residuals`: `in_place` has reductions added to a residual that is read no more; `apart` leaves that to Inductor.
    """

    fuse: FusePolicy = "auto"
    topology: str = "probe"
    results: ResultPolicy = "ordinary"
    residuals: ResidualPolicy = "in_place"

    def __post_init__(self) -> None:
        if self.fuse not in get_args(FusePolicy):
            valid = ", ".join(get_args(FusePolicy))
            near = near_text(self.fuse, get_args(FusePolicy))
            raise OptionError(f"mkernel.fuse must be one of {valid}; got {self.fuse!r}{near}")
        if not isinstance(self.topology, str):
            raise OptionError(f"mkernel.topology must be a name, got {type(self.topology).__name__}")
        if self.results not in get_args(ResultPolicy):
            valid = ", ".join(get_args(ResultPolicy))
            raise OptionError(f"mkernel.results must be one of {valid}; got {self.results!r}")
        if self.residuals not in get_args(ResidualPolicy):
            valid = ", ".join(get_args(ResidualPolicy))
            raise OptionError(f"mkernel.residuals must be one of {valid}; got {self.residuals!r}")


def near_text(given: object, known: Iterable[str]) -> str:
    """` (did you mean ...?)`, where a name that is known is close."""
    near = difflib.get_close_matches(str(given), list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _parse(name: str, text: str, kind: type) -> object:
    if kind is bool:
        lowered = text.strip().lower()
        if lowered in ("1", "true", "yes", "on"):
            return True
        if lowered in ("0", "false", "no", "off", ""):
            return False
        raise OptionError(f"{name} must be 0 or 1, got {text!r}")
    try:
        return kind(text)
    except ValueError as error:
        raise OptionError(f"{name} must be {_NUMBERS[kind]}; got {text!r}") from error


def setting_names() -> list[str]:
    """Settings that have a variable."""
    return [field.name for field in fields(Settings) if field.name not in ("is_sm_reserve_given", "launches_block")]


def read_settings(environment: Mapping[str, str]) -> Settings:
    """Settings from `MKCOMPILE_*` variables; an unknown one is an error that lists the valid ones."""
    defaults = Settings()
    known = {f"MKCOMPILE_{name.upper()}": name for name in setting_names()}
    given = {name: text for name, text in environment.items() if name.startswith("MKCOMPILE_")}
    for name in given:
        if name not in known:
            raise OptionError(f"unknown setting {name}; valid: {', '.join(sorted(known))}{near_text(name, known)}")
    if "MKCOMPILE_LOG_LEVEL" in given:
        given["MKCOMPILE_LOG_LEVEL"] = given["MKCOMPILE_LOG_LEVEL"].strip().upper()
    values = {
        known[name]: _parse(name, text, Path if known[name] == "cache_dir" else type(getattr(defaults, known[name])))
        for name, text in given.items()
    }
    values["is_sm_reserve_given"] = "sm_reserve" in values
    values["launches_block"] = environment.get("CUDA_LAUNCH_BLOCKING", "") not in ("", "0")
    settings = replace(defaults, **values)  # type: ignore[arg-type]
    return replace(settings, cache_dir=settings.cache_dir.expanduser())


@cache
def settings() -> Settings:
    """The settings of this process, read once."""
    return read_settings(os.environ)


def option_names() -> list[str]:
    """All of our options, as `torch.compile` takes them."""
    return [OPTION_PREFIX + field.name for field in fields(Options)]


def split_options(options: Mapping[str, object] | None) -> tuple[Options, dict[str, object]]:
    """Our options, and the rest (Inductor's).

    Raises: OptionError for an unknown `mkernel.` name, with the valid ones, and for what is no mapping.
    """
    if options is not None and not isinstance(options, Mapping):
        raise OptionError(f"options must be a dict, such as {{'mkernel.fuse': 'always'}}; got {options!r}")
    ours: dict[str, object] = {}
    theirs: dict[str, object] = {}
    for name, value in (options or {}).items():
        if not name.startswith(OPTION_PREFIX):
            theirs[name] = value
        elif name in option_names():
            ours[name.removeprefix(OPTION_PREFIX)] = value
        else:
            near = near_text(name, option_names())
            raise OptionError(f"unknown option {name!r}; valid: {', '.join(option_names())}{near}")
    return Options(**ours), theirs  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignSettings:
    """What other programs' environment variables say; never set by us.

    `multicast_off_by`: the assignment that forbids NVLink multicast, or an empty string. `ranks_per_node`: as torchrun
    has started them; 0: not known. `device_queues`: that CUDA has for all streams of a device.
    """

    multicast_off_by: str = ""
    ranks_per_node: int = 0
    device_queues: int = 8


def read_foreign_settings(environment: Mapping[str, str]) -> ForeignSettings:
    """Variables of torch, NCCL and torchrun that we respect."""
    off = (("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"), ("NCCL_NVLS_ENABLE", "0"))
    off_by = [f"{name}={text}" for name, text in off if environment.get(name, "").strip() == text]
    per_node = environment.get("LOCAL_WORLD_SIZE", "")
    queues = environment.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    return ForeignSettings(
        multicast_off_by=off_by[0] if off_by else "",
        ranks_per_node=int(per_node) if per_node.isdigit() else 0,
        device_queues=int(queues) if queues.isdigit() else 8,
    )


def foreign_settings() -> ForeignSettings:
    """Those of this process."""
    return read_foreign_settings(os.environ)
