// The epilogue's sum over the ranks, `sum_ranks` of csrc/device/epilogue.cuh, built for the CPU on memory of the host.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __expf expf

struct Index {
  unsigned x;
};
static Index threadIdx{0}, blockIdx{0}, gridDim{1};
static unsigned char shared_bytes[1 << 20];

template <class To, class From>
static To bits_of(From value) {
  To bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}
static float __uint_as_float(unsigned bits) { return bits_of<float>(bits); }
static unsigned __float_as_uint(float value) { return bits_of<unsigned>(value); }
static void __syncwarp() {}
static void __nanosleep(unsigned) {}
static void __threadfence_system() {}
static void __trap() { std::abort(); }
static int __ffs(int bits) { return __builtin_ffs(bits); }
static float __fdividef(float a, float b) { return a / b; }
template <class T>
static T __ldg(const T* at) { return *at; }
static std::size_t __cvta_generic_to_shared(const void* at) { return (const unsigned char*)at - shared_bytes; }
static void* __cvta_shared_to_generic(std::size_t at) { return shared_bytes + at; }

namespace mk {
inline constexpr bool kTrace = false;
}
// The instructions that are used: these in place of the device's.
#define load_vector device_load_vector
#define load_shared device_load_shared
#define load_shared_vector device_load_shared_vector
#include "device/ptx.cuh"
#undef load_vector
#undef load_shared
#undef load_shared_vector
namespace mk {
static Vector4 load_vector(const void* at) { return bits_of<Vector4>(*static_cast<const Vector4*>(at)); }
static u32 load_shared(u32 at) { return *reinterpret_cast<u32*>(shared_bytes + at); }
static Vector4 load_shared_vector(u32 at) { return load_vector(shared_bytes + at); }
}  // namespace mk
#include "device/epilogue.cuh"

using namespace mk;
using Tile = TileShape<128, 256, 3, false, true>;
constexpr int kThreadsOfGroup = 128, kValues = Tile::kPanelN / 2;

struct Bfloat16 {
  static float low(u32 pair) { return __uint_as_float(pair << 16); }
  static float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
};
using Values = Panel<Bfloat16, Tile>;
using Part = std::vector<float>;  ///< of one rank, one panel: [thread][value], each a bfloat16

/// So far apart in size that each order of a sum rounds to other bits.
static Part random_part() {
  Part part(kThreadsOfGroup * kValues);
  for (float& value : part) {
    value = Bfloat16::high(__float_as_uint(std::ldexp((float)std::rand() / RAND_MAX - 0.5f, std::rand() % 30)));
  }
  part[3] = -0.f;
  return part;
}

static void stage(u8* panel, const Part& part) {
  for (unsigned thread = 0; thread < kThreadsOfGroup; ++thread) {
    threadIdx.x = thread;
    for (int i = 0; i < kValues; i += 2) {
      const float* pair = &part[thread * kValues + i];
      const u32 packed = __float_as_uint(pair[0]) >> 16 | (__float_as_uint(pair[1]) & 0xffff0000u);
      std::memcpy(panel + Values::fragment_offset() + i / 8 * 512 + i % 8 * 2, &packed, 4);
    }
  }
}

/// Values that differ by a bit from the sum in rank order. The slot of the partial that lies in shared memory is NaN.
extern "C" int wrong_sums(u32 world, u32 rank, u32 epoch, u32 tile, int group, int index) {
  static u8 workspace[1 << 25];
  std::memset(workspace, 0xff, sizeof(workspace));
  LaunchArguments args{};
  args.world = world, args.rank = rank, args.slots = 4;
  args.region_offset = 4096, args.region_bytes = 12 << 20;
  args.workspace[rank] = (u64)workspace;
  const SharedMemory<Tile> memory{0};
  std::memcpy(shared_bytes + memory.epoch(), &epoch, 4);
  const u32 in_tile = (group * Tile::kPanels + index) * Tile::kPanelBytes, shared = memory.panel(group, index);
  std::vector<Part> parts;
  for (u32 source = 0; source < world; ++source) {
    parts.push_back(random_part());
    if (source == rank) continue;
    u8* staged = Staging<Tile>{args, epoch}.partial_slot(rank, source, tile) + in_tile;
    stage(source == (rank == 0 ? 1u : 0u) ? shared_bytes + shared : staged, parts[source]);
  }
  const u8* slot = Staging<Tile>{args, 0}.partial_slot(rank, rank + 1 < world ? rank + 1 : 0, tile) + in_tile;
  int wrong = 0;
  for (unsigned thread = 0; thread < kThreadsOfGroup; ++thread) {
    threadIdx.x = thread;
    Values sum;
    std::vector<float> accumulators(Tile::kPanels * kValues, NAN);  // of other panels, which are not to be seen
    std::copy_n(&parts[rank][thread * kValues], kValues, &accumulators[index * kValues]);
    sum_ranks<Bfloat16, Tile>(args, memory, shared, slot, accumulators.data(), index, sum);
    for (int i = 0; i < kValues; ++i) {
      float wanted = parts[0][thread * kValues + i];
      for (u32 source = 1; source < world; ++source) wanted += parts[source][thread * kValues + i];
      wrong += __float_as_uint(wanted) != __float_as_uint(sum.values[i]);
    }
  }
  return wrong;
}
