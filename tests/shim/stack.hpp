// The few CUDA types and instructions that dspark/kernels/stack.cu names, for a CPU. All blocks run beside one another, for they wait
// for each other.
#pragma once
#include <algorithm>
#include <cmath>

#include "floats.hpp"
#include "warps.hpp"

#define DSPARK_SHIM
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(threads)

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

namespace dspark_stack {

typedef uint32_t u32;
typedef uint16_t u16;
typedef unsigned long long u64;

inline int threads_of_block;
inline volatile u32 fetched;
inline std::vector<std::unique_ptr<uint4[]>> memory;

inline int lane_id() { return warps::lane(); }
inline int thread_id() { return fibers::current % threads_of_block; }
inline int warp_id() { return thread_id() / 32; }
inline int block_id() { return fibers::current / threads_of_block; }
inline void sync_block() { fibers::meet(fibers::blocks[block_id()]); }
inline char* shared_memory() { return (char*)memory[block_id()].get(); }
inline float never() { return -INFINITY; }
inline float larger(float a, float b) { return std::fmax(a, b); }
inline float power2(float x) { return std::exp2(x); }
inline float root(float x) { return 1.0f / std::sqrt(x); }
using warps::across;

inline float widen(u16 value) { return HALF ? floats::from_half(value) : floats::from_bfloat(value); }
inline u16 narrow(float value) { return HALF ? floats::to_half(value) : floats::to_bfloat(value); }
inline u32 pair(float low, float high) { return narrow(low) | (u32(narrow(high)) << 16); }
inline u32 low_halves(u32 a, u32 b) { return (a & 0xFFFF) | (b << 16); }
inline u32 high_halves(u32 a, u32 b) { return (a >> 16) | (b & 0xFFFF0000u); }
inline void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { warps::mma<widen>(d, a, b0, b1); }
inline u32 turned(u32 value) { return warps::turned(value); }

template <class T>
T load_as(const void* from) {
  if ((uintptr_t)from % alignof(T)) std::abort();
  return *(const T*)from;
}
inline uint4 load_weights(const uint4* from) { return load_as<uint4>(from); }
inline uint2 load_scales(const uint2* from) { return load_as<uint2>(from); }
// What is asked for ahead of time has to be there.
inline void fetch(const uint4* from, u32 units) {
  if (!units) std::abort();
  fetched += load_as<uint4>(from).x + load_as<uint4>(from + units - 1).x;
}
inline u32 fma2(u32 a, u32 b, u32 c) {
  const auto one = [&](int at) { return widen(u16(a >> at)) * widen(u16(b >> at)) + widen(u16(c >> at)); };
  return pair(one(0), one(16));
}
inline uint4 load16(const void* from) { return load_as<uint4>(from); }
inline uint2 load8(const void* from) { return load_as<uint2>(from); }
inline float4 load_floats(const float* from) { return load_as<float4>(from); }
inline float2 load_two(const float* from) { return load_as<float2>(from); }
inline float load_float(const float* from) { return *from; }
// Copies that a thread has asked for come when it waits for them; until then there is not a number.
struct Copy {
  uint4* to;
  const uint4* from;
  bool is;
};
struct Copies {
  std::vector<Copy> open;
  std::vector<std::vector<Copy>> groups;
};
inline std::vector<Copies> copies;
inline void copy16(uint4* to, const uint4* from, bool is) {
  if ((uintptr_t)to % 16 || (uintptr_t)from % 16) std::abort();
  std::memset(to, 0xFF, 16);
  copies[fibers::current].open.push_back({to, from, is});
}
inline void end_group() {
  Copies& own = copies[fibers::current];
  own.groups.push_back(std::move(own.open));
  own.open.clear();
}
inline void copied_but(int n) {
  auto& groups = copies[fibers::current].groups;
  for (; (int)groups.size() > n; groups.erase(groups.begin())) {
    for (const Copy& each : groups[0]) *each.to = each.is ? *each.from : uint4{0, 0, 0, 0};
  }
}

inline void arrive(u32* counter) {
  sync_block();
  if (thread_id() == 0) ++*counter, ++fibers::noticed;
}
inline void await(u32* counter, u32 count) {
  if (thread_id() == 0) {
    while (*counter < count) fibers::pause();
    ++fibers::noticed;
  }
  sync_block();
}
inline u32 leave(u32* counter) { return (*counter)++; }

inline void put_larger(u64* to, u64 value) { *to = std::max(*to, value); }
inline u64 load_key(const u64* from) { return *from; }
inline u64 across_key(u64 value, int distance) { return warps::across_bits(value, distance); }
inline u32 bits_of(float value) { return floats::float_to_bits(value); }
inline float widen_bfloat(u16 value) { return floats::from_bfloat(value); }
inline float widen_half(u16 value) { return floats::from_half(value); }

// What a block may use lies in front of a fence. Not a number in all of it.
constexpr int FENCE = 256;
inline int outcome(bool ended) {
  for (auto& block : memory) {
    const auto* behind = (const unsigned char*)block.get() + SHARED_BYTES;
    for (int i = 0; i < FENCE; ++i) {
      if (behind[i] != 0xFF) return 2;
    }
  }
  return ended;
}

// 0: threads wait for one another for ever; 2: a block wrote behind its memory.
inline int launch(int blocks, int threads, std::function<void()> body) {
  constexpr int UNITS = (SHARED_BYTES + FENCE) / sizeof(uint4) + 1;
  threads_of_block = threads;
  memory.clear();
  copies.assign(blocks * threads, Copies());
  for (int i = 0; i < blocks; ++i) {
    memory.emplace_back(new uint4[UNITS]);
    std::memset(memory.back().get(), 0xFF, UNITS * sizeof(uint4));
  }
  return outcome(warps::launch_together(blocks, threads, body));
}

}  // namespace dspark_stack
