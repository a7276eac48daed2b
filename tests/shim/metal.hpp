// The few Metal types and functions that dspark/kernels/qmm.metal names, for a CPU.
#pragma once
#include "fibers.hpp"
#include "floats.hpp"

#define device
#define constant
#define thread

typedef unsigned int uint;
typedef unsigned short ushort;

struct alignas(8) uint2 {
  uint x, y;
  uint2() = default;
  uint2(uint a, uint b) : x(a), y(b) {}
};
struct alignas(16) uint4 {
  uint x, y, z, w;
};

struct half {
  ushort bits;
  half() = default;
  explicit half(float value) : bits(floats::to_half(value)) {}
  explicit operator float() const { return floats::from_half(bits); }
};

template <typename To, typename From>
To as_type(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To out;
  std::memcpy((void*)&out, &value, sizeof(To));
  return out;
}

enum class mem_flags { mem_threadgroup };
inline void threadgroup_barrier(mem_flags) { fibers::meet(fibers::block); }

template <typename T, int ROWS, int COLUMNS>
struct simdgroup_matrix {
  T own[2];
  T (&thread_elements())[2] { return own; }
};

// A lane's two elements are beside each other. The layout is the one that Apple's GPUs have: a lane's bits 4, 2, 1 make its
// row and bits 3, 0 its pair of columns.
inline int matrix_row(int lane) { return (lane >> 4 & 1) * 4 + (lane >> 2 & 1) * 2 + (lane >> 1 & 1); }
inline int matrix_column(int lane) { return (lane >> 3 & 1) * 4 + (lane & 1) * 2; }

template <typename T>
struct Posted {
  T left[8][8], right[8][8];
};
inline std::vector<Posted<float>> posted;

template <typename T>
void simdgroup_multiply_accumulate(
    simdgroup_matrix<T, 8, 8>& out, simdgroup_matrix<T, 8, 8> a, simdgroup_matrix<T, 8, 8> b,
    simdgroup_matrix<T, 8, 8> c) {
  const int simd = fibers::current >> 5, lane = fibers::current & 31, row = matrix_row(lane), column = matrix_column(lane);
  for (int i = 0; i < 2; ++i) {
    posted[simd].left[row][column + i] = a.own[i];
    posted[simd].right[row][column + i] = b.own[i];
  }
  fibers::meet(fibers::warps[simd]);
  for (int i = 0; i < 2; ++i) {
    T sum = c.own[i];
    for (int k = 0; k < 8; ++k) sum += posted[simd].left[row][k] * posted[simd].right[k][column + i];
    out.own[i] = sum;
  }
  fibers::meet(fibers::warps[simd]);
}

struct Position {
  uint x, y, z;
};
inline Position threadgroup_position_in_grid;

inline bool launch_groups(int groups, int threads, std::function<void()> body) {
  bool ended = true;
  posted.resize(threads / 32);
  for (int group = 0; group < groups; ++group) {
    threadgroup_position_in_grid = {(uint)group, 0, 0};
    ended &= fibers::run(threads, body);
  }
  return ended;
}
#define simdgroup_index_in_threadgroup (fibers::current >> 5)
#define thread_index_in_simdgroup (fibers::current & 31)
