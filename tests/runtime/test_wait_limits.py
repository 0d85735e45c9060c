"""What device waits report and how long a block waits for itself: checked while a kernel of nothing is compiled."""

from __future__ import annotations

import pytest

from mkcompile.errors import CompileError
from mkcompile.runtime import nvrtc, sources
from mkcompile.runtime.kernel import OPTIONS

pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")

_SOURCE = """
namespace mk { inline constexpr bool kTrace = false; }
#include "device/mailbox.cuh"
using namespace mk;
constexpr bool wanted[4] = {true, false, true, true};
static_assert(CONDITION);
extern "C" __global__ void k() {}
"""


def holds(condition: str) -> bool:
    try:
        nvrtc.compile_cubin("k", _SOURCE.replace("CONDITION", condition), sources.headers(), OPTIONS)
    except CompileError as error:
        assert "static assertion" in str(error)
        return False
    return True


def test_peers_that_come_one_after_the_other_are_no_fault_of_the_block() -> None:
    long = 60_000_000_000
    enough = [f"stall_limit_ns({long}ull, {world}) > {world * long}ull" for world in (1, 2, 4, 16)]
    assert holds(" && ".join(enough))
    assert not holds(f"stall_limit_ns({long}ull, 4) == stall_limit_ns({long}ull, 2)")


def test_a_timeout_counts_the_words_that_were_waited_for() -> None:
    assert holds("count_wanted(wanted) == 3")
