// Causal attention of up to 16 rows over the keys of a cache, read in place in the cache's longer buffer. One block for each head
// of each batch row; of its warps each walks over its own keys, 16 at a time, with maxima and sums of its own, and at the end all
// are put together. Nothing but that end goes through shared memory.
//
// The rows are the 16-row operand of the tensor cores, keys or columns of values the 8-column one. Which columns stand for which
// places of an operand is free as long as both operands agree, so every lane loads whole pieces of 8 or 16 bytes. Products of
// 16-bit numbers are exact and summed in float32; a weight is handed on as two 16-bit numbers, itself and what rounding took off.
//
// A key that a row does not see weighs nothing, and keys have places of their own: a row gives the same bits whatever came with it.
//
// Set in front of this text: D (columns a head, a multiple of 32), WARPS (8), HALF (1: float16, 0: bfloat16), SCALE (what scores
// are multiplied by, times log2(e)).

#ifndef DSPARK_SHIM
namespace dspark_attention {

typedef unsigned int u32;
typedef unsigned short u16;

__device__ __forceinline__ int lane_id() { return threadIdx.x & 31; }
__device__ __forceinline__ int warp_id() { return threadIdx.x >> 5; }
__device__ __forceinline__ int block_id() { return blockIdx.x; }
__device__ __forceinline__ void sync_block() { __syncthreads(); }
__device__ __forceinline__ float across(float value, int distance) {
  return __shfl_xor_sync(0xFFFFFFFFu, value, distance);
}
__device__ __forceinline__ float never() { return __uint_as_float(0xFF800000u); }
__device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ float power2(float value) {
  float out;
  asm("ex2.approx.f32 %0, %1;" : "=f"(out) : "f"(value));
  return out;
}

// d += a * b: a is 16 x 16, b is 16 x 8, both 16 bits wide.
__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if HALF
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float widen(u16 value) {
#if HALF
  float out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(value));
  return out;
#else
  return __uint_as_float((u32)value << 16);
#endif
}

__device__ __forceinline__ u32 pair(float low, float high) {
  u32 out;
#if HALF
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
#else
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
#endif
  return out;
}

__device__ __forceinline__ u32 low_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x5410); }
__device__ __forceinline__ u32 high_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x7632); }

template <int WORDS>
__device__ __forceinline__ void load(u32* to, const u16* from) {
  if constexpr (WORDS == 4) {
    asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "l"(from));
  } else {
    asm volatile("ld.global.nc.v2.u32 {%0,%1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(from));
  }
}
#else
namespace dspark_attention {
#endif

constexpr int ROWS = 16;                     // of the operand, and keys a warp takes at once
constexpr int STEPS = D / 16;                // products that a score takes
constexpr int WIDE = D % 64 == 0 ? 8 : 4;    // columns of values in a piece that a lane loads
constexpr int PIECES = D / (8 * WIDE);       // such pieces of a row of values
constexpr int TILES = D / 8;                 // of the output, 8 columns each
constexpr int THREADS = 32 * WARPS;
constexpr int STRIDE = ROWS * WARPS;         // keys that the warps take together

struct Job {
  const u16 *q, *k, *v;
  u16* out;
  int heads, kv_heads, length, seen, room;
};

// Of 16 keys: two, with the columns that this lane hands to the products.
struct Keys {
  u32 words[2][D / 8];
};

// Of 16 values: four.
struct Values {
  u32 words[4][PIECES][WIDE / 2];
};

// What a warp knows of its rows lane / 4 and lane / 4 + 8 so far: the largest score, this lane's part of the sum of weights, and
// the weighted values.
struct Sums {
  float most[2], total[2], values[TILES][4];
};

// 32 columns at a time, 8 to a lane; zeros behind the last row, for what lies there may be no number.
__device__ __forceinline__ void fetch_row(u32* words, const u16* from, int row, int rows) {
#pragma unroll
  for (int part = 0; part < D / 32; ++part) {
    u32* to = words + 4 * part;
    if (row < rows) {
      load<4>(to, from + (long long)row * D + 32 * part + 8 * (lane_id() & 3));
    } else {
      to[0] = to[1] = to[2] = to[3] = 0;
    }
  }
}

__device__ __forceinline__ void fetch_keys(Keys& keys, const u16* from, int first, int seen) {
  fetch_row(keys.words[0], from, first + (lane_id() >> 2), seen);
  fetch_row(keys.words[1], from, first + (lane_id() >> 2) + 8, seen);
}

__device__ __forceinline__ void fetch_values(Values& values, const u16* from, int first, int seen) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int key = first + 2 * (lane_id() & 3) + (i & 1) + 8 * (i >> 1);
#pragma unroll
    for (int p = 0; p < PIECES; ++p) {
      if (key < seen) {
        load<WIDE / 2>(values.words[i][p], from + (long long)key * D + 8 * WIDE * p + WIDE * (lane_id() >> 2));
      } else {
#pragma unroll
        for (int w = 0; w < WIDE / 2; ++w) values.words[i][p][w] = 0;
      }
    }
  }
}

// Scores of 16 keys from `first` on, those that a row does not see as small as can be.
__device__ __forceinline__ void score(
    float (&scores)[2][4], const u32 (&q)[STEPS][4], const Keys& keys, const Job& job, int first) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) scores[n][c] = 0.0f;
#pragma unroll
    for (int s = 0; s < STEPS; ++s) mma(scores[n], q[s], keys.words[n][2 * s], keys.words[n][2 * s + 1]);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int key = first + 8 * n + 2 * (lane_id() & 3) + (c & 1);
      const int last = job.seen - job.length + (lane_id() >> 2) + 8 * (c >> 1);
      scores[n][c] = key <= last ? scores[n][c] * SCALE : never();
    }
  }
}

// Scores become weights, and what was summed before shrinks to the new maximum.
__device__ __forceinline__ void weigh(float (&scores)[2][4], Sums& sums) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float most = sums.most[half];
#pragma unroll
    for (int i = 0; i < 4; ++i) most = larger(most, scores[i >> 1][2 * half + (i & 1)]);
    most = larger(most, across(most, 1));
    most = larger(most, across(most, 2));
    // A row that has seen no key yet.
    const float base = most == never() ? 0.0f : most;
    const float shrink = power2(sums.most[half] - base);
    sums.most[half] = most;
    sums.total[half] *= shrink;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& weight = scores[i >> 1][2 * half + (i & 1)];
      weight = power2(weight - base);
      sums.total[half] += weight;
    }
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      sums.values[t][2 * half] *= shrink;
      sums.values[t][2 * half + 1] *= shrink;
    }
  }
}

__device__ __forceinline__ void gather(const float (&weights)[2][4], const Values& values, Sums& sums) {
  u32 coarse[4], fine[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float low = weights[i >> 1][2 * (i & 1)], high = weights[i >> 1][2 * (i & 1) + 1];
    coarse[i] = pair(low, high);
    fine[i] = pair(low - widen((u16)coarse[i]), high - widen((u16)(coarse[i] >> 16)));
  }
#pragma unroll
  for (int p = 0; p < PIECES; ++p) {
#pragma unroll
    for (int w = 0; w < WIDE / 2; ++w) {
      const u32 a = values.words[0][p][w], b = values.words[1][p][w];
      const u32 c = values.words[2][p][w], d = values.words[3][p][w];
      float(&even)[4] = sums.values[p * WIDE + 2 * w];
      float(&odd)[4] = sums.values[p * WIDE + 2 * w + 1];
      mma(even, coarse, low_halves(a, b), low_halves(c, d));
      mma(odd, coarse, high_halves(a, b), high_halves(c, d));
      mma(even, fine, low_halves(a, b), low_halves(c, d));
      mma(odd, fine, high_halves(a, b), high_halves(c, d));
    }
  }
}

// The warps' sums together, divided by all weights and stored, 32 columns at a time.
__device__ __forceinline__ void put(const Sums& sums, const Job& job, int batch, int head) {
  __shared__ float most[WARPS][ROWS], total[WARPS][ROWS], values[WARPS][ROWS][36];
  const int warp = warp_id(), lane = lane_id(), quarter = lane & 3;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = sums.total[half];
    sum += across(sum, 1);
    sum += across(sum, 2);
    if (quarter == 0) {
      most[warp][(lane >> 2) + 8 * half] = sums.most[half];
      total[warp][(lane >> 2) + 8 * half] = sum;
    }
  }
  sync_block();
  float part[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = (lane >> 2) + 8 * half;
    float best = most[0][row], all = 0.0f;
#pragma unroll
    for (int w = 1; w < WARPS; ++w) best = larger(best, most[w][row]);
#pragma unroll
    for (int w = 0; w < WARPS; ++w) all += total[w][row] * power2(most[w][row] - best);
    part[half] = power2(sums.most[half] - best) / all;
  }
#pragma unroll
  for (int p = 0; p < TILES / 4; ++p) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      float* to = values[warp][(lane >> 2) + 8 * (c >> 1)] + 4 * (2 * quarter + (c & 1));
#pragma unroll
      for (int t = 0; t < 4; ++t) to[t] = sums.values[4 * p + t][c] * part[c >> 1];
    }
    sync_block();
    // Two columns a thread: the 4 tiles hold 4 neighbours in each of 8 places.
    for (int i = warp * 32 + lane; i < 16 * job.length; i += THREADS) {
      const int row = i >> 4, at = 2 * (i & 15), tile = 4 * p + (at & 3);
      float low = 0.0f, high = 0.0f;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        low += values[w][row][at];
        high += values[w][row][at + 1];
      }
      const int column = tile / WIDE * (8 * WIDE) + (at >> 2) * WIDE + tile % WIDE;
      const long long to = (((long long)batch * job.length + row) * job.heads + head) * D + column;
      *(u32*)(job.out + to) = pair(low, high);
    }
    sync_block();
  }
}

__device__ __forceinline__ void run(const Job& job) {
  const int head = block_id() % job.heads, batch = block_id() / job.heads;
  const long long from = ((long long)batch * job.kv_heads + head / (job.heads / job.kv_heads)) * job.room * D;
  u32 q[STEPS][4];
  {
    const u16* rows = job.q + (long long)block_id() * job.length * D;
    u32 words[2][D / 8];
    fetch_row(words[0], rows, lane_id() >> 2, job.length);
    fetch_row(words[1], rows, (lane_id() >> 2) + 8, job.length);
#pragma unroll
    for (int i = 0; i < 4 * STEPS; ++i) q[i / 4][i % 4] = words[i & 1][i / 4 * 2 + (i % 4 >> 1)];
  }
  Sums sums;
  sums.most[0] = sums.most[1] = never();
  sums.total[0] = sums.total[1] = 0.0f;
#pragma unroll
  for (int i = 0; i < 4 * TILES; ++i) sums.values[i / 4][i % 4] = 0.0f;
  int first = ROWS * warp_id();
  Keys keys;
  fetch_keys(keys, job.k + from, first, job.seen);
  for (; first < job.seen; first += STRIDE) {
    Values values;
    fetch_values(values, job.v + from, first, job.seen);
    float scores[2][4];
    score(scores, q, keys, job, first);
    // On their way while these are weighed.
    fetch_keys(keys, job.k + from, first + STRIDE, job.seen);
    weigh(scores, sums);
    gather(scores, values, sums);
  }
  put(sums, job, batch, head);
}

}  // namespace dspark_attention
