// The few CUDA types and instructions that dspark/kernels/attention.cu names, for a CPU.
#pragma once
#include "floats.hpp"
#include "warps.hpp"

#define DSPARK_SHIM
#define __device__
#define __forceinline__ inline
#define __shared__ static

namespace dspark_attention {

typedef uint32_t u32;
typedef uint16_t u16;

using warps::across;
using warps::launch;

inline int lane_id() { return warps::lane(); }
inline int warp_id() { return warps::warp(); }
inline int block_id() { return warps::block_number; }
inline void sync_block() { fibers::meet(fibers::block); }
inline float never() { return -INFINITY; }
// The one that is a number, as a GPU has it.
inline float larger(float a, float b) { return std::fmax(a, b); }
inline float power2(float value) { return std::exp2(value); }

inline float widen(u16 value) { return HALF ? floats::from_half(value) : floats::from_bfloat(value); }
inline u16 narrow(float value) { return HALF ? floats::to_half(value) : floats::to_bfloat(value); }
inline u32 pair(float low, float high) { return narrow(low) | (u32(narrow(high)) << 16); }
inline u32 low_halves(u32 a, u32 b) { return (a & 0xFFFF) | (b << 16); }
inline u32 high_halves(u32 a, u32 b) { return (a >> 16) | (b & 0xFFFF0000u); }
inline void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { warps::mma<widen>(d, a, b0, b1); }

template <int WORDS>
void load(u32* to, const u16* from) {
  if ((uintptr_t)from % (4 * WORDS)) std::abort();
  std::memcpy(to, from, 4 * WORDS);
}

}  // namespace dspark_attention
