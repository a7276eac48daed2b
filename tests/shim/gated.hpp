// The few CUDA types and instructions that dspark/kernels/gated.cu names, for a CPU.
#pragma once
#include "floats.hpp"
#include "warps.hpp"

#define DSPARK_SHIM
#define __device__
#define __forceinline__ inline

namespace dspark_gated {

typedef uint32_t u32;
typedef uint16_t u16;

using warps::across;
using warps::launch;

inline int lane_id() { return warps::lane(); }
inline int warp_id() { return warps::warp(); }
inline int block_id() { return warps::block_number; }
inline float mul(float a, float b) { return a * b; }
inline float add(float a, float b) { return a + b; }
inline float fma3(float a, float b, float c) { return std::fma(a, b, c); }

template <int KIND>
float widen(u16 value) {
  return KIND == 1 ? floats::from_half(value) : floats::from_bfloat(value);
}
template <int KIND>
u16 narrow(float value) {
  return KIND == 1 ? floats::to_half(value) : floats::to_bfloat(value);
}

}  // namespace dspark_gated
