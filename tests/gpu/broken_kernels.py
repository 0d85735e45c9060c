"""Defects to plant in the device sources."""

from __future__ import annotations

from collections.abc import Mapping

#: Waits for peers return at once.
NO_WAIT = (
    "device/sync.cuh",
    "  u32 seen = load_acquire_sys(flag);\n  if (reached(seen, epoch)) return true;\n  const u64",
    "  u32 seen = load_acquire_sys(flag);\n  if (reached(seen, epoch) || true) return true;\n  const u64",
)
#: A streaming kernel takes the words of its mailbox as they are.
NO_MAIL = ("device/mailbox.cuh", "  while (missing != 0) {\n", "  while (missing == ~0u) {\n")
#: It does not give them back.
NO_CLEAR = (
    "device/mailbox.cuh",
    "    if (!wanted[u]) continue;\n    // Relaxed: the roll",
    "    continue;\n    // Relaxed: the roll",
)
#: Blocks of a cluster do not wait for each other's sums.
NO_EXCHANGE = ("device/stream_epilogue.cuh", "      exchange.await_partials();\n", "")

#: Rows of an all-gather are read as they are.
NO_ARRIVALS = (
    "device/gather_image.cuh",
    "    meet(source, row_tile);\n",
    "    return count;\n",
)

#: Its images are told of a while before they are sent.
NO_CARRIED = (
    "device/gather_carry.cuh",
    "    trace.begin();\n    wait_loaded();\n#pragma",
    "    publish(images, at, count);\n    __nanosleep(200000);\n    wait_loaded();\n#pragma",
)

#: Chunks that come over the network are read as they are.
NO_NETWORK_WAIT = (
    "device/network/send.cuh",
    "    if (given_up) return;\n    const NetworkFlags flags{args, staging.epoch};\n",
    "    return;\n    const NetworkFlags flags{args, staging.epoch};\n",
)

#: Rows of a gather over several nodes are read as they are.
NO_CHUNK_WAIT = (
    "device/network/gather.cuh",
    "    if (given_up || (source == place.owner",
    "    if (true || (source == place.owner",
)


def without(headers: Mapping[str, str], name: str, healthy: str, broken: str) -> dict[str, str]:
    """The headers with one piece of text replaced, which must occur once."""
    assert headers[name].count(healthy) == 1, f"{name} has changed: plant the defect anew"
    return {**headers, name: headers[name].replace(healthy, broken)}
