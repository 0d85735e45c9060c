#pragma once
// One PTX instruction a function, no policy. Addresses in shared memory are 32-bit, in global memory pointers.
#include "abi/launch_arguments.h"
#include "device/qualifiers.cuh"

namespace mk {

// ---- threads ----

MK_DEVICE u64 global_timer_ns() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}
template <int kRegisters>
MK_DEVICE void increase_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
MK_DEVICE void decrease_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

/// What was launched after this kernel in its stream may take SMs as they become free, if it can wait by itself.
MK_DEVICE void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
/// What was launched before this kernel in its stream has finished, and its writes are visible.
MK_DEVICE void await_predecessors() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// ---- mbarriers ----

MK_DEVICE u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }
MK_DEVICE const u8* shared_pointer(u32 address) {
  return static_cast<const u8*>(__cvta_shared_to_generic(address));
}

MK_DEVICE void mbarrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
MK_DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

MK_DEVICE void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
MK_DEVICE void mbarrier_arrive_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
/// May suspend the thread for a while.
MK_DEVICE bool mbarrier_try_wait(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done;
}
/// Never suspends.
MK_DEVICE bool mbarrier_test_wait(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done;
}

// ---- clusters of blocks ----

MK_DEVICE u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
/// Relaxed: `fence_mbarrier_init` has released the barriers, and a release here is a fence of the whole GPU.
MK_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
MK_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
/// The address of the same place in the shared memory of another block of the cluster.
MK_DEVICE u32 map_shared(u32 address, u32 rank) {
  u32 mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}
/// Counts its 16 bytes at the other block's barrier when they have arrived there.
MK_DEVICE void store_async(u32 mapped, float a, float b, float c, float d, u32 mapped_barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(mapped), "f"(a),
      "f"(b), "f"(c), "f"(d), "r"(mapped_barrier)
      : "memory");
}
/// Arrives at the barrier of another block, after this thread's reads of shared memory. With `.release.cluster` it would
/// also wait for all that the thread has stored anywhere, partials on their way to a peer included.
MK_DEVICE void mbarrier_arrive_cluster(u32 mapped) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(mapped) : "memory");
}
/// As mbarrier_try_wait, for what other blocks of the cluster have sent.
MK_DEVICE bool mbarrier_try_wait_cluster(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done;
}

// ---- bulk copies (the async proxy) ----

MK_DEVICE void prefetch_tensor_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
MK_DEVICE void tensor_load(u32 shared, const TensorMap* map, u32 barrier, i32 x, i32 y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          shared),
      "l"(map), "r"(barrier), "r"(x), "r"(y)
      : "memory");
}
/// Into the L2 cache: nobody waits for it.
MK_DEVICE void tensor_prefetch(const TensorMap* map, i32 x, i32 y) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(map), "r"(x), "r"(y));
}
MK_DEVICE void tensor_store(const TensorMap* map, u32 shared, i32 x, i32 y, i32 z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];"
               :: "l"(map), "r"(shared), "r"(x), "r"(y), "r"(z) : "memory");
}
/// Each element of the result becomes the sum of what it was and the tile's, rounded to nearest. Clips as a store does.
MK_DEVICE void tensor_add(const TensorMap* map, u32 shared, i32 x, i32 y, i32 z) {
  asm volatile("cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4}], [%1];"
               :: "l"(map), "r"(shared), "r"(x), "r"(y), "r"(z) : "memory");
}
MK_DEVICE void bulk_load(u32 shared, const void* global, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(barrier)
               : "memory");
}
MK_DEVICE void bulk_store(void* global, u32 shared, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared), "r"(bytes)
               : "memory");
}
MK_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

/// All but the newest `kPending` groups have read their shared memory.
template <int kPending>
MK_DEVICE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
/// All but the newest `kPending` groups are complete: their writes have been made visible to this thread.
template <int kPending>
MK_DEVICE void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}
MK_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }
MK_DEVICE void fence_proxy_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- ordered and unordered words ----

MK_DEVICE u32 load_acquire_sys(const u32* word) {
  u32 value;
  asm volatile("ld.acquire.sys.global.b32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
MK_DEVICE u64 load_acquire_sys(const u64* word) {
  u64 value;
  asm volatile("ld.acquire.sys.global.b64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}
MK_DEVICE u32 load_relaxed_gpu(const u32* word) {
  u32 value;
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
MK_DEVICE u64 load_relaxed_gpu(const u64* word) {
  u64 value;
  asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}
MK_DEVICE void store_relaxed_sys(u32* word, u32 value) {
  asm volatile("st.relaxed.sys.global.b32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
MK_DEVICE void store_relaxed_sys(u64* word, u64 value) {
  asm volatile("st.relaxed.sys.global.b64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
MK_DEVICE void store_release_sys(u64* word, u64 value) {
  asm volatile("st.release.sys.global.b64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
MK_DEVICE void fence_acq_rel_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
MK_DEVICE void fence_acq_rel_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

MK_DEVICE u32 add_relaxed_gpu(u32* word, u32 value) {
  u32 old;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(word), "r"(value) : "memory");
  return old;
}
MK_DEVICE u64 add_relaxed_gpu(u64* word, u64 value) {
  u64 old;
  asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;" : "=l"(old) : "l"(word), "l"(value) : "memory");
  return old;
}
MK_DEVICE u32 compare_and_swap_gpu(u32* word, u32 expected, u32 value) {
  u32 old;
  asm volatile("atom.relaxed.gpu.global.cas.b32 %0, [%1], %2, %3;"
               : "=r"(old) : "l"(word), "r"(expected), "r"(value) : "memory");
  return old;
}
MK_DEVICE u32 load_acquire_shared(u32 address) {
  u32 value;
  asm volatile("ld.acquire.cta.shared::cta.b32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}
MK_DEVICE void store_release_shared(u32 address, u32 value) {
  asm volatile("st.release.cta.shared::cta.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
MK_DEVICE u32 load_shared(u32 address) {
  u32 value;
  asm volatile("ld.shared::cta.b32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}
MK_DEVICE void store_shared(u32 address, u32 value) {
  asm volatile("st.shared::cta.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// ---- vectors ----

struct Vector2 {
  u32 x, y;
};
struct Vector4 {
  u32 x, y, z, w;
};
MK_DEVICE Vector4 load_global_vector(const void* global) {
  Vector4 v;
  asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(global) : "memory");
  return v;
}
/// From shared or global memory.
MK_DEVICE Vector4 load_vector(const void* pointer) {
  Vector4 v;
  asm volatile("ld.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(pointer) : "memory");
  return v;
}
/// Each 32-bit word is read, or written, as a whole; the four together need not be.
MK_DEVICE Vector4 load_relaxed_sys(const Vector4* global) {
  Vector4 v;
  asm volatile("ld.relaxed.sys.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(global)
               : "memory");
  return v;
}
MK_DEVICE Vector2 load_relaxed_sys(const Vector2* global) {
  Vector2 v;
  asm volatile("ld.relaxed.sys.global.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(global) : "memory");
  return v;
}
MK_DEVICE void store_relaxed_sys(Vector4* global, Vector4 v) {
  asm volatile("st.relaxed.sys.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(global), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w) : "memory");
}
MK_DEVICE void store_relaxed_sys(Vector2* global, Vector2 v) {
  asm volatile("st.relaxed.sys.global.v2.b32 [%0], {%1, %2};" ::"l"(global), "r"(v.x), "r"(v.y) : "memory");
}
MK_DEVICE void store_global(Vector2* global, Vector2 v) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(global), "r"(v.x), "r"(v.y) : "memory");
}
MK_DEVICE Vector4 load_shared_vector(u32 address) {
  Vector4 v;
  asm volatile("ld.shared::cta.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
  return v;
}
MK_DEVICE void store_shared_pair(u32 address, Vector2 v) {
  asm volatile("st.shared::cta.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(v.x), "r"(v.y) : "memory");
}
MK_DEVICE void store_shared_vector(u32 address, Vector4 v) {
  asm volatile("st.shared::cta.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w) : "memory");
}
/// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
MK_DEVICE void store_matrix(u32 address, Vector4 v) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

// ---- tensor cores ----

MK_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
MK_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
MK_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

}  // namespace mk
