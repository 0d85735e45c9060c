// Sizes and offsets of all that Python mirrors.
#include <cstddef>

#include "host/c_api.h"

namespace {

using mk::Command;
using mk::ProxyEvent;
using mk::ProxyOptions;
using mk::RingControl;
using mk::host::Error;

// offsetof takes a name, so a list of fields takes a macro
#define MK_FIELD(structure, field) \
  {#structure, #field, offsetof(structure, field), sizeof(static_cast<structure*>(nullptr)->field)}
#define MK_SIZE(structure) {#structure, "", 0, sizeof(structure)}

constexpr MkLayout kLayouts[] = {
    MK_SIZE(Command),
    MK_FIELD(Command, source_offset),
    MK_FIELD(Command, destination_offset),
    MK_FIELD(Command, bytes),
    MK_FIELD(Command, peer),
    MK_FIELD(Command, chunk),
    MK_FIELD(Command, epoch),
    MK_FIELD(Command, reserved),
    MK_FIELD(Command, header),
    MK_SIZE(RingControl),
    MK_FIELD(RingControl, consumed),
    MK_FIELD(RingControl, retired),
    MK_FIELD(RingControl, fault),
    MK_SIZE(Error),
    MK_FIELD(Error, number),
    MK_FIELD(Error, peer),
    MK_FIELD(Error, call),
    MK_FIELD(Error, device),
    MK_FIELD(Error, detail),
    MK_SIZE(MkFacts),
    MK_FIELD(MkFacts, ring_control),
    MK_FIELD(MkFacts, ring_slots),
    MK_FIELD(MkFacts, registration),
    MK_FIELD(MkFacts, counts),
    MK_FIELD(MkFacts, device),
    MK_SIZE(MkHooks),
    MK_FIELD(MkHooks, context),
    MK_FIELD(MkHooks, copy_start),
    MK_FIELD(MkHooks, copy_finished),
    MK_FIELD(MkHooks, copy_pin),
    MK_FIELD(MkHooks, copy_unpin),
    MK_FIELD(MkHooks, flag_write),
    MK_FIELD(MkHooks, flag_commit),
    MK_FIELD(MkHooks, write_order),
    MK_SIZE(ProxyEvent),
    MK_FIELD(ProxyEvent, time_ns),
    MK_FIELD(ProxyEvent, ticket),
    MK_FIELD(ProxyEvent, bytes),
    MK_FIELD(ProxyEvent, peer),
    MK_FIELD(ProxyEvent, chunk),
    MK_FIELD(ProxyEvent, epoch),
    MK_FIELD(ProxyEvent, kind_and_lane),
    MK_SIZE(ProxyOptions),
    MK_FIELD(ProxyOptions, region_base),
    MK_FIELD(ProxyOptions, region_bytes),
    MK_FIELD(ProxyOptions, flags_offset),
    MK_FIELD(ProxyOptions, ring_control),
    MK_FIELD(ProxyOptions, ring_slots),
    MK_FIELD(ProxyOptions, copy_context),
    MK_FIELD(ProxyOptions, copy_start),
    MK_FIELD(ProxyOptions, copy_finished),
    MK_FIELD(ProxyOptions, copy_pin),
    MK_FIELD(ProxyOptions, copy_unpin),
    MK_FIELD(ProxyOptions, flag_context),
    MK_FIELD(ProxyOptions, flag_flush),
    MK_FIELD(ProxyOptions, flag_write),
    MK_FIELD(ProxyOptions, flag_commit),
    MK_FIELD(ProxyOptions, bounce_base),
    MK_FIELD(ProxyOptions, bounce_bytes),
    MK_FIELD(ProxyOptions, peer_bases),
    MK_FIELD(ProxyOptions, dmabuf_offset),
    MK_FIELD(ProxyOptions, window_ns),
    MK_FIELD(ProxyOptions, timeout_ns),
    MK_FIELD(ProxyOptions, idle_spin_ns),
    MK_FIELD(ProxyOptions, seed),
    MK_FIELD(ProxyOptions, bandwidth_bytes_per_s),
    MK_FIELD(ProxyOptions, latency_ns),
    MK_FIELD(ProxyOptions, shuffle_ns),
    MK_FIELD(ProxyOptions, transport),
    MK_FIELD(ProxyOptions, memory_kind),
    MK_FIELD(ProxyOptions, dmabuf),
    MK_FIELD(ProxyOptions, num_flags),
    MK_FIELD(ProxyOptions, rank),
    MK_FIELD(ProxyOptions, world),
    MK_FIELD(ProxyOptions, lanes),
    MK_FIELD(ProxyOptions, max_outstanding),
    MK_FIELD(ProxyOptions, ring_capacity),
    MK_FIELD(ProxyOptions, timeline_capacity),
    MK_FIELD(ProxyOptions, order),
    MK_FIELD(ProxyOptions, write_order),
    MK_FIELD(ProxyOptions, always_bounces),
    MK_FIELD(ProxyOptions, reserved),
    MK_FIELD(ProxyOptions, device),
};

}  // namespace

const MkLayout* mk_layouts(mk::u32* count) {
  *count = sizeof kLayouts / sizeof kLayouts[0];
  return kLayouts;
}
