#pragma once
// The shared library's interface, in plain C types; mkcompile/runtime/proxy/library.py declares it to Python.
//
// Functions that return int return 0, or a positive errno with `error` filled. Times are limits from now, in
// nanoseconds. One thread at a time may use a proxy, except for mk_proxy_fault, mk_proxy_counters, mk_proxy_timeline,
// mk_proxy_push, mk_proxy_wait_retired and mk_proxy_wait_flag, which any thread may call while it lives.
#include "abi/command_ring.h"
#include "abi/proxy_records.h"
#include "host/error.h"

#define MK_EXPORT extern "C" __attribute__((visibility("default")))

struct MkProxy;
struct MkCudaEngine;

/// Functions of an engine, as ProxyOptions takes them.
struct MkHooks {
  mk::u64 context, copy_start, copy_finished, copy_pin, copy_unpin, flag_write, flag_commit;
  mk::u32 write_order;  ///< WriteOrder of the device's memory
  mk::u32 reserved;
};

/// Where one field of a shared structure lies.
struct MkLayout {
  const char* structure;
  const char* field;  ///< empty: `bytes` is the structure's size
  mk::u64 offset;
  mk::u64 bytes;
};

/// What a proxy is made of.
struct MkFacts {
  mk::u64 ring_control;
  mk::u64 ring_slots;
  mk::u32 registration;  ///< host::Registration
  mk::u32 counts;        ///< 1: flags of the own region are published by the own proxy, 0: by the sender's NIC
  char device[64];
};

/// All layouts, for Python to compare; `count` is their number.
MK_EXPORT const MkLayout* mk_layouts(mk::u32* count);
/// Why transport `kind` can't work in this build or on this machine; empty text where nothing is known to be missing.
MK_EXPORT void mk_transport_missing(mk::u32 kind, char* text, mk::u32 bytes);

MK_EXPORT int mk_proxy_open(const mk::ProxyOptions* options, MkProxy** proxy, mk::host::Error* error);
/// `bytes`: room at `blob`, then what was used.
MK_EXPORT int mk_proxy_endpoint(MkProxy* proxy, mk::u32 peer, mk::u8* blob, mk::u32* bytes, mk::host::Error* error);
MK_EXPORT int mk_proxy_connect(MkProxy* proxy, mk::u32 peer, const mk::u8* blob, mk::u32 bytes,
                               mk::host::Error* error);
MK_EXPORT int mk_proxy_finish(MkProxy* proxy, mk::u64 limit_ns, mk::host::Error* error);
MK_EXPORT int mk_proxy_start(MkProxy* proxy, mk::host::Error* error);
MK_EXPORT void mk_proxy_facts(MkProxy* proxy, MkFacts* facts);

/// 1 where the proxy has failed, with its first failure; else 0.
MK_EXPORT int mk_proxy_fault(MkProxy* proxy, mk::host::Error* error);
MK_EXPORT void mk_proxy_counters(MkProxy* proxy, mk::u64* counters);  ///< [kNumCounters]
MK_EXPORT mk::u32 mk_proxy_timeline(MkProxy* proxy, mk::u64 from, mk::ProxyEvent* events, mk::u32 room, mk::u64* next);

/// A command from the host. Returns 0, EPIPE (the proxy has stopped) or ETIMEDOUT (the ring stayed full).
MK_EXPORT int mk_proxy_push(MkProxy* proxy, const mk::Command* command, mk::u64 limit_ns, mk::u64* ticket);
MK_EXPORT int mk_proxy_wait_retired(MkProxy* proxy, mk::u64 ticket, mk::u64 limit_ns);
MK_EXPORT int mk_proxy_wait_flag(MkProxy* proxy, mk::u32 chunk, mk::u32 epoch, mk::u64 limit_ns, mk::u32* seen);

/// Ends the proxy and frees it. Where a callback never comes back it is leaked, and ETIMEDOUT returned.
MK_EXPORT int mk_proxy_close(MkProxy* proxy, mk::u64 limit_ns, mk::host::Error* error);

/// Copies and flags for the memory of one CUDA device. It must outlive the proxies that use it, one at a time.
MK_EXPORT int mk_cuda_engine_open(int device, mk::u32 streams, MkCudaEngine** engine, MkHooks* hooks,
                                  mk::host::Error* error);
MK_EXPORT void mk_cuda_engine_close(MkCudaEngine* engine);
/// A dma-buf of the allocation with `bytes` at `address`, which the caller closes, and where the address lies in it.
MK_EXPORT int mk_cuda_export(MkCudaEngine* engine, mk::u64 address, mk::u64 bytes, int* descriptor, mk::u64* offset,
                             mk::host::Error* error);
