// The few CUDA types and instructions that dspark/kernels/gated.cu names, for a CPU.
#pragma once
#include "fibers.hpp"
#include "floats.hpp"

#define DSPARK_SHIM
#define __device__
#define __forceinline__ inline

namespace dspark_gated {

typedef uint32_t u32;
typedef uint16_t u16;

inline int block_number;
inline std::vector<std::vector<float>> lanes;

inline int lane_id() { return fibers::current & 31; }
inline int warp_id() { return fibers::current >> 5; }
inline int block_id() { return block_number; }

// A lane that does not take part leaves the others waiting for ever.
inline float across(float value, int distance) {
  const int warp = warp_id(), lane = lane_id();
  lanes[warp][lane] = value;
  fibers::meet(fibers::warps[warp]);
  const float other = lanes[warp][lane ^ distance];
  fibers::meet(fibers::warps[warp]);
  return other;
}
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

inline bool launch(int blocks, int threads, std::function<void()> body) {
  bool ended = true;
  lanes.assign(threads / 32, std::vector<float>(32));
  for (block_number = 0; block_number < blocks; ++block_number) ended &= fibers::run(threads, body);
  return ended;
}

}  // namespace dspark_gated
