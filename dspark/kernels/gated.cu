// The gated delta rule for all rows of a block in one launch. For each head, with a state S [Dv, Dk]:
//   S = S * g[t];  d = (v[t] - S k[t]) * beta[t];  S = S + d k[t]^T;  y[t] = S q[t]
//
// A warp holds ROWS rows of S in registers, its lanes side by side along Dk, and walks over the rows of the block. Every
// operation's rounding is named, so that a row gives the same bits whatever the block's length and whichever variant runs.
//
// Set in front of this text: DK, DV, ROWS (of S a warp), WARPS, X, GATE, BETA (number formats of q, k, v and y; of g; of beta:
// 0 float32, 1 float16, 2 bfloat16), VECTOR (1: a gate for each column of S), MASKED (1: rows under a mask), COUNTED (1: the
// first n[b] rows only, and nothing but the state is asked for).

#ifndef DSPARK_SHIM
namespace dspark_gated {

typedef unsigned int u32;
typedef unsigned short u16;

__device__ __forceinline__ int lane_id() { return threadIdx.x & 31; }
__device__ __forceinline__ int warp_id() { return threadIdx.x >> 5; }
__device__ __forceinline__ int block_id() { return blockIdx.x; }
__device__ __forceinline__ float across(float value, int distance) {
  return __shfl_xor_sync(0xFFFFFFFFu, value, distance);
}
__device__ __forceinline__ float mul(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float fma3(float a, float b, float c) { return __fmaf_rn(a, b, c); }

template <int KIND>
__device__ __forceinline__ float widen(u16 value) {
  if constexpr (KIND == 1) {
    float out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(value));
    return out;
  } else {
    return __uint_as_float((u32)value << 16);
  }
}

template <int KIND>
__device__ __forceinline__ u16 narrow(float value) {
  u16 out;
  if constexpr (KIND == 1) {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out) : "f"(value));
  } else {
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(value));
  }
  return out;
}
#else
namespace dspark_gated {
#endif

constexpr int PER = DK / 32;   // columns of S that a lane holds
constexpr int GATES = VECTOR ? PER : 1;

// An array with its steps in elements, so that views need no copy.
struct View {
  const void* data;
  long long s0, s1, s2, s3;
};

template <int KIND>
__device__ __forceinline__ float load(const View& from, long long at) {
  if constexpr (KIND == 0) {
    return ((const float*)from.data)[at];
  } else {
    return widen<KIND>(((const u16*)from.data)[at]);
  }
}

// What one row of the block brings.
struct Row {
  float q[PER], k[PER], v[ROWS], g[GATES], beta;
  bool counts;
};

struct Job {
  View q, k, v, g, beta, state, mask;
  const int* counts;
  void* y;
  float* out;
  int length, key_heads, heads;
};

struct Place {
  int batch, head, key, row;
};

__device__ __forceinline__ void fetch(Row& row, const Job& job, const Place& at, int t) {
  const int lane = lane_id();
  row.counts = true;
  if (MASKED) {
    row.counts = ((const unsigned char*)job.mask.data)[at.batch * job.mask.s0 + t * job.mask.s1] != 0;
  }
  const long long k0 = at.batch * job.k.s0 + t * job.k.s1 + at.key * job.k.s2;
  const long long q0 = at.batch * job.q.s0 + t * job.q.s1 + at.key * job.q.s2;
  const long long g0 = at.batch * job.g.s0 + t * job.g.s1 + at.head * job.g.s2;
  const long long v0 = at.batch * job.v.s0 + t * job.v.s1 + at.head * job.v.s2;
#pragma unroll
  for (int i = 0; i < PER; ++i) {
    row.k[i] = load<X>(job.k, k0 + (lane + 32 * i) * job.k.s3);
    row.q[i] = COUNTED ? 0.0f : load<X>(job.q, q0 + (lane + 32 * i) * job.q.s3);
  }
#pragma unroll
  for (int i = 0; i < GATES; ++i) {
    row.g[i] = load<GATE>(job.g, VECTOR ? g0 + (lane + 32 * i) * job.g.s3 : g0);
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r) row.v[r] = load<X>(job.v, v0 + (at.row + r) * job.v.s3);
  row.beta = load<BETA>(job.beta, at.batch * job.beta.s0 + t * job.beta.s1 + at.head * job.beta.s2);
}

// The sum over a warp's lanes, the same bits in every lane.
__device__ __forceinline__ float total(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance >>= 1) value = add(value, across(value, distance));
  return value;
}

__device__ __forceinline__ void put(const Job& job, const Place& at, int t, int r, float value) {
  const long long to = (((long long)at.batch * job.length + t) * job.heads + at.head) * DV + at.row + r;
  if constexpr (X == 0) {
    ((float*)job.y)[to] = value;
  } else {
    ((u16*)job.y)[to] = narrow<X>(value);
  }
}

__device__ __forceinline__ void step(float (&state)[ROWS][PER], const Row& row, const Job& job, const Place& at, int t) {
  float sums[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < PER; ++i) {
      state[r][i] = mul(state[r][i], row.g[VECTOR ? i : 0]);
      sum = fma3(state[r][i], row.k[i], sum);
    }
    sums[r] = sum;
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r) sums[r] = mul(add(row.v[r], -total(sums[r])), row.beta);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < PER; ++i) {
      state[r][i] = fma3(row.k[i], sums[r], state[r][i]);
      sum = fma3(state[r][i], row.q[i], sum);
    }
    if constexpr (!COUNTED) {
      sum = total(sum);
      if (lane_id() == r) put(job, at, t, r, sum);
    }
  }
}

// One block: WARPS * ROWS rows of one head's state.
__device__ __forceinline__ void run(const Job& job) {
  constexpr int TILES = DV / (ROWS * WARPS);
  const int lane = lane_id(), pair = block_id() / TILES;
  const int head = pair % job.heads;
  const Place at = {
      pair / job.heads, head, head / (job.heads / job.key_heads), (block_id() % TILES * WARPS + warp_id()) * ROWS};
  float state[ROWS][PER];
  const long long from = at.batch * job.state.s0 + head * job.state.s1;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int i = 0; i < PER; ++i) {
      state[r][i] = load<0>(job.state, from + (at.row + r) * job.state.s2 + (lane + 32 * i) * job.state.s3);
    }
  }
  int length = job.length;
  if (COUNTED && job.counts[at.batch] < length) length = job.counts[at.batch];
  Row row;
  if (length > 0) fetch(row, job, at, 0);
  for (int t = 0; t < length; ++t) {
    // The next row is on its way while this one is worked on.
    Row next = row;
    if (t + 1 < length) fetch(next, job, at, t + 1);
    if (row.counts) {
      step(state, row, job, at, t);
    } else if (!COUNTED && lane < ROWS) {
      put(job, at, t, lane, 0.0f);
    }
    row = next;
  }
  float* to = job.out + (((long long)pair * DV) + at.row) * DK;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int i = 0; i < PER; ++i) to[r * DK + lane + 32 * i] = state[r][i];
  }
}

}  // namespace dspark_gated
