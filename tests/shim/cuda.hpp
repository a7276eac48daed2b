// The few CUDA types and instructions that dspark/kernels/qmm.cu names, for a CPU. Copies that run behind a thread's back
// are carried out when it waits for them, so a wait that is missing or too weak leaves zeros in their place.
#pragma once
#include <deque>

#include "floats.hpp"
#include "warps.hpp"

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
inline int thread_id() { return fibers::current; }
inline int lane_id() { return warps::lane(); }
inline int warp_id() { return warps::warp(); }
inline int block_id() { return warps::block_number; }
inline void sync_warp() { warps::meet(); }
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

inline void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { warps::mma<widen>(d, a, b0, b1); }

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
  return warps::launch(blocks, threads, body, [=] {
    copies.assign(threads, {{}});
    std::memset(shared, 0xFF, sizeof(shared));
  });
}

}  // namespace dspark_qmm
