"""What can be measured: models, forms, sizes and modes, and which contenders take part in each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A stack of Llama blocks, whole; every width is divided among the ranks."""

    layers: int
    hidden: int
    features: int
    heads: int
    kv_heads: int
    head: int = 128


#: `70B-tp8-local` has, on each of two GPUs, the GEMMs that a GPU has where 70B is spread over eight.
MODELS = {
    "8B": Sizes(layers=4, hidden=4096, features=14336, heads=32, kv_heads=8),
    "70B": Sizes(layers=2, hidden=8192, features=28672, heads=64, kv_heads=8),
    "70B-tp8-local": Sizes(layers=2, hidden=8192, features=7168, heads=16, kv_heads=2),
    "tiny": Sizes(layers=1, hidden=64, features=128, heads=4, kv_heads=2, head=16),
}
FORMS = ("all-reduce", "sequence")
TOKENS = ((1, 512), (1, 2048), (1, 4096), (4, 4096))
TINY_TOKENS = (2, 16)
#: Whole models for inference: a prompt, or one token of each of several sequences.
WHOLE = ("HF-Llama", "HF-Qwen3", "HF-tiny")
OWN_PLAN = "own plan"
WHOLE_TOKENS = ((1, 2048), (1, 1), (8, 1), (64, 1))
MODES = ("default", "reduce-overhead")
CONTENDERS = ("eager", "inductor", "async_tp", "mkernel")
#: Ours with other options, beside ours in the same cell, where it is asked for.
VARIANT = "variant"
#: Tokens of a sample up to which a model in fp32 is the truth; above, eager alone is compared with.
TRUTH_TOKENS = 4096

Key = tuple[str, str, int, int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One model at one size in one mode of `torch.compile`: all its contenders run in one pair of processes."""

    model: str
    form: str
    batch: int
    tokens: int
    mode: str

    @property
    def key(self) -> Key:
        """What rows of results are known by."""
        return self.model, self.form, self.batch, self.tokens, self.mode

    @property
    def rows(self) -> int:
        """Tokens of all samples."""
        return self.batch * self.tokens

    @property
    def graphs(self) -> bool:
        """Are CUDA graphs asked for?"""
        return self.mode == "reduce-overhead"

    @property
    def trains(self) -> bool:
        """Is there a backward pass?"""
        return self.model not in WHOLE

    def __str__(self) -> str:
        return f"{self.model} {self.form} {self.batch}x{self.tokens} {self.mode}"

    def contenders(self, wanted: tuple[str, ...], device: str) -> tuple[str, ...]:
        """Those that differ here: async TP fuses no all-reduce and needs NCCL; eager has no CUDA graphs."""
        absent = set()
        if self.form != "sequence" or device != "cuda":
            absent.add("async_tp")
        if self.graphs:
            absent.add("eager")
        return tuple(one for one in (*CONTENDERS, VARIANT) if one in wanted and one not in absent)

    @property
    def work(self) -> int:
        """About what compiling takes, for an order: layers, passes and contenders."""
        layers = MODELS[self.model].layers if self.trains else 4
        return layers * (3 if self.trains else 1) * (3 if self.form == "sequence" else 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which cells; an empty tuple stands for all of a kind."""

    models: tuple[str, ...] = ()
    forms: tuple[str, ...] = ()
    tokens: tuple[tuple[int, int], ...] = ()
    modes: tuple[str, ...] = ()

    def cells(self, device: str) -> list[Cell]:
        """In the order of measuring: what takes longest comes first, or all pairs but one wait for it at the end.

        On the CPU there are only tiny ones, and no CUDA graphs.
        """
        on_cpu = device == "cpu"
        models = self.models or (
            ("tiny",) if on_cpu else tuple(name for name in (*MODELS, *WHOLE) if "tiny" not in name)
        )
        blocks = [name for name in models if name in MODELS]
        whole = [name for name in models if name in WHOLE]
        modes = self.modes or (MODES[:1] if on_cpu else MODES)
        found = [
            Cell(model=model, form=form, batch=batch, tokens=length, mode=mode)
            for (batch, length), mode, model, form in product(
                self.tokens or ((TINY_TOKENS,) if on_cpu else TOKENS), modes, blocks, self.forms or FORMS
            )
        ]
        tokens = [one for one in WHOLE_TOKENS if not self.tokens or one in self.tokens]
        found += [
            Cell(model=model, form=OWN_PLAN, batch=batch, tokens=length, mode=mode)
            for (batch, length), mode, model in product(tokens if not self.forms else (), modes, whole)
        ]
        return sorted(found, key=lambda cell: (-cell.work, cell.rows))


Unit = tuple[Cell, ...]


def units_of(cells: Sequence[Cell], together: bool) -> tuple[Unit, ...]:
    """What a pair of processes takes at once: a cell, or both modes of one where both are there, the one without graphs
    first.
    """
    if not together:
        return tuple((cell,) for cell in cells)
    found: dict[Key, list[Cell]] = {}
    for cell in cells:
        found.setdefault((*cell.key[:4], ""), []).append(cell)
    return tuple(tuple(sorted(unit, key=lambda cell: MODES.index(cell.mode))) for unit in found.values())
