// The few CUDA types and instructions that dspark/kernels/qmm.cu names, for a CPU. Copies that run behind a thread's back
// are carried out when it waits for them, so a wait that is missing or too weak leaves zeros in their place.
#pragma once
#include <deque>

#include "fibers.hpp"
#include "floats.hpp"

#define DSPARK_SHIM
#define __device__
#define __forceinline__ inline
#define __shared__

struct uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

inline uint4 shared[1 << 14];

namespace dspark_qmm {

typedef uint32_t u32;
typedef uint16_t u16;

struct Copy {
  void* to;
  const void* from;
  int bytes;
  bool valid;
};
inline std::vector<std::deque<std::vector<Copy>>> copies;
struct Operands {
  u32 a[32][4], b[32][2];
};
inline std::vector<Operands> operands;
inline int block_number;

inline int thread_id() { return fibers::current; }
inline int lane_id() { return thread_id() & 31; }
inline int warp_id() { return thread_id() >> 5; }
inline int block_id() { return block_number; }
inline void sync_warp() { fibers::meet(fibers::warps[warp_id()]); }
inline void sync_block() { fibers::meet(fibers::block); }
inline void opaque(int&) {}

inline float widen(u16 value) { return HALF ? floats::from_half(value) : floats::from_bfloat(value); }
inline u16 narrow(float value) { return HALF ? floats::to_half(value) : floats::to_bfloat(value); }
inline u32 both(u32 low, u32 high) { return (low & 0xFFFF) | (high << 16); }
inline u32 low_halves(u32 a, u32 b) { return both(a, b); }
inline u32 high_halves(u32 a, u32 b) { return both(a >> 16, b >> 16); }
inline u32 add2(u32 a, u32 b) {
  return both(narrow(widen(u16(a)) + widen(u16(b))), narrow(widen(u16(a >> 16)) + widen(u16(b >> 16))));
}

inline float half_of(u32 pair, int which) { return widen(u16(pair >> (16 * which))); }

// The fragments' layout is the one in the PTX manual for m16n8k16.
inline void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  Operands& all = operands[warp_id()];
  const int lane = lane_id(), row = lane >> 2, quarter = lane & 3;
  std::memcpy(all.a[lane], a, sizeof(a));
  all.b[lane][0] = b0, all.b[lane][1] = b1;
  sync_warp();
  for (int i = 0; i < 4; ++i) {
    const int m = row + 8 * (i >> 1), n = 2 * quarter + (i & 1);
    float sum = 0;
    for (int k = 0; k < 16; ++k) {
      const int from = (k & 7) >> 1, late = k >> 3;
      const float left = half_of(all.a[(m & 7) * 4 + from][(m >> 3) + 2 * late], k & 1);
      sum += left * half_of(all.b[n * 4 + from][late], k & 1);
    }
    d[i] += sum;
  }
  sync_warp();
}

template <int BYTES>
void copy_async(void* to, const void* from, bool valid) {
  if ((uintptr_t)to % BYTES || (valid && (uintptr_t)from % BYTES)) std::abort();
  copies[thread_id()].back().push_back({to, from, BYTES, valid});
}
inline void commit_copies() { copies[thread_id()].emplace_back(); }
template <int LEFT>
void wait_copies() {
  auto& groups = copies[thread_id()];
  while ((int)groups.size() - 1 > LEFT) {
    for (const Copy& copy : groups.front()) {
      copy.valid ? (void)std::memcpy(copy.to, copy.from, copy.bytes) : (void)std::memset(copy.to, 0, copy.bytes);
    }
    groups.pop_front();
  }
}
inline uint4 load16(const void* from) {
  if ((uintptr_t)from % 16) std::abort();
  return *(const uint4*)from;
}

inline bool launch(int blocks, int threads, std::function<void()> body) {
  bool ended = true;
  for (block_number = 0; block_number < blocks; ++block_number) {
    copies.assign(threads, {{}});
    operands.resize(threads / 32);
    std::memset(shared, 0xFF, sizeof(shared));
    ended &= fibers::run(threads, body);
  }
  return ended;
}

}  // namespace dspark_qmm
