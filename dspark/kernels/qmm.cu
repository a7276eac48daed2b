// y[m, n] = sum_k x[m, k] * (scale[n, k / GROUP] * q[n, k] + bias[n, k / GROUP]) for 1 to 8 * COLS rows of x.
//
// The weights are the 16-row operand of the tensor cores and the rows of x the 8-column one, so that one pass over the
// weights serves every row. A warp walks over its own slices of K (128 bytes of each of 16 weight rows at a time, through a
// ring of asynchronous copies), multiplies the bare integers, which 16-bit floats hold exactly, and applies scale and bias
// to the sums in float32: one multiplication for each group, not for each weight. The warps of a block share the same
// weight rows and add up their sums at the end.
//
// Set in front of this text: BITS (4, 8), GROUP (32, 64), COLS (8 rows of x each: 1, 2), TILES (of 16 weight rows a block),
// WARPS, STAGES (a power of two), PIECE (bytes a copy of scales takes: 4, 8, 16), HALF (1: float16, 0: bfloat16).

#ifndef DSPARK_SHIM
namespace dspark_qmm {

typedef unsigned int u32;
typedef unsigned short u16;

__device__ __forceinline__ int lane_id() { return threadIdx.x & 31; }
__device__ __forceinline__ int warp_id() { return threadIdx.x >> 5; }
__device__ __forceinline__ int block_id() { return blockIdx.x; }
__device__ __forceinline__ int thread_id() { return threadIdx.x; }
__device__ __forceinline__ void sync_warp() { __syncwarp(); }
__device__ __forceinline__ void sync_block() { __syncthreads(); }

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

// Two 16-bit sums.
__device__ __forceinline__ u32 add2(u32 a, u32 b) {
  u32 out;
#if HALF
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
#else
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(0x3F803F80u), "r"(b));
#endif
  return out;
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

__device__ __forceinline__ u16 narrow(float value) {
  u16 out;
#if HALF
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out) : "f"(value));
#else
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(value));
#endif
  return out;
}

__device__ __forceinline__ u32 low_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x5410); }
__device__ __forceinline__ u32 high_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x7632); }

// Copies BYTES bytes into shared memory behind the thread's back; zeros where `valid` is false.
template <int BYTES>
__device__ __forceinline__ void copy_async(void* to, const void* from, bool valid) {
  u32 address = (u32)__cvta_generic_to_shared(to);
  int bytes = valid ? BYTES : 0;
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(bytes));
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(address), "l"(from), "n"(BYTES), "r"(bytes));
  }
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::); }
template <int LEFT>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT));
}

// Keeps the compiler from holding what it could derive from `value` in registers.
__device__ __forceinline__ void opaque(int& value) { asm volatile("" : "+r"(value)); }

__device__ __forceinline__ uint4 load16(const void* from) {
  uint4 out;
  asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w)
               : "l"(from));
  return out;
}
#else
namespace dspark_qmm {
#endif

constexpr int CHUNK = 1024 / BITS;             // K a stage holds: 128 bytes of a weight row
constexpr int GROUPS = CHUNK / GROUP;          // groups a stage holds
constexpr int WORDS = GROUP * BITS / 32 / 4;   // 32-bit words of a group that one lane decodes
constexpr int PAIRS = BITS == 8 ? 1 : 2;       // matrix products a word feeds
constexpr int STEPS = WORDS * PAIRS;           // matrix products a group takes
constexpr int SCALE_BYTES = GROUPS * 2;        // scales of one weight row in a stage
constexpr int STAGE_BYTES = 2048 + 32 * SCALE_BYTES;
constexpr u32 ONES = HALF ? 0x3C003C00u : 0x3F803F80u;
// What a decoded weight is short of: 8 bits are centred on 0, 4 bits carry the constant that made them floats.
constexpr float SHIFT = BITS == 8 ? 128.0f : (HALF ? -1024.0f : -128.0f);

// Which of its 8 units of 16 bytes a weight row keeps in place 0: spreads the rows of a column over the banks.
__device__ __forceinline__ int swizzle(int row) { return ((row & 1) << 2) | (row & 2) | ((row >> 2) & 1); }

// Elements `pair` and the one that the tensor cores multiply beside it, as two 16-bit floats.
__device__ __forceinline__ u32 decode(u32 word, int pair) {
#if BITS == 8
  word >>= 8 * pair;
#if HALF
  return add2((word & 0x00FF00FFu) | 0x64006400u, 0xE480E480u);
#else
  // 7 bits fit into the mantissa of 128; the eighth chooses what is taken off: 128 or 256.
  return add2((word & 0x007F007Fu) | 0x43004300u, (word & 0x00800080u) ^ 0xC380C380u);
#endif
#else
  return ((word >> (4 * pair)) & 0x000F000Fu) | (HALF ? 0x64006400u : 0x43004300u);
#endif
}

// What one block multiplies: weight rows from `row` on.
struct Job {
  const u32* w;
  const u16* scales;
  const u16* biases;
  u16* y;
  int row;
  int n;
};

__device__ __forceinline__ void fetch(char* stage, const Job& job, int tile, int k0, int k) {
  const int lane = lane_id();
  const int row0 = job.row + tile * 16;
  const long row_bytes = (long)k * BITS / 8;
  const char* weights = (const char*)job.w + row0 * row_bytes + (long)k0 * BITS / 8;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = (lane >> 3) + 4 * i, unit = lane & 7;
    copy_async<16>(
        stage + row * 128 + ((unit ^ swizzle(row)) << 4), weights + row * row_bytes + unit * 16,
        k0 + unit * (128 / BITS) < k);
  }
  const int row = lane & 15, groups = k / GROUP, group0 = k0 / GROUP;
  const u16* from = (lane < 16 ? job.scales : job.biases) + (long)(row0 + row) * groups + group0;
#pragma unroll
  for (int i = 0; i < SCALE_BYTES; i += PIECE) {
    copy_async<PIECE>(stage + 2048 + lane * SCALE_BYTES + i, from + i / 2, group0 + i / 2 < groups);
  }
}

// This lane's part of the rows of x for one stage, in the order in which `decode` gives the weights.
__device__ __forceinline__ void load_x(
    u32 (&b)[COLS][GROUPS][STEPS][2], const u16* x, int k0, int k, int m) {
  const int lane = lane_id(), row = lane >> 2, quarter = lane & 3;
#pragma unroll
  for (int c = 0; c < COLS; ++c) {
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
      const int at = k0 + g * GROUP + quarter * (GROUP / 4);
      u32 raw[GROUP / 8];
#pragma unroll
      for (int i = 0; i < GROUP / 32; ++i) {
        uint4 part = {0, 0, 0, 0};
        if (c * 8 + row < m && at < k) part = load16(x + (long)(c * 8 + row) * k + at + 8 * i);
        raw[4 * i] = part.x, raw[4 * i + 1] = part.y, raw[4 * i + 2] = part.z, raw[4 * i + 3] = part.w;
      }
#pragma unroll
      for (int s = 0; s < STEPS; ++s) {
        // 8 bits: elements (0, 2) and (1, 3) of a word; 4 bits: (0, 4) and (1, 5), then (2, 6) and (3, 7).
        const int near = BITS == 8 ? 2 * s : 4 * (s / 2) + s % 2, far = near + (BITS == 8 ? 1 : 2);
        b[c][g][s][0] = low_halves(raw[near], raw[far]);
        b[c][g][s][1] = high_halves(raw[near], raw[far]);
      }
    }
  }
}

// Adds one stage's products to the sums of a tile.
__device__ __forceinline__ void multiply(
    float (&sums)[COLS][4], const char* stage, const u32 (&b)[COLS][GROUPS][STEPS][2],
    const float (&x_sums)[COLS][GROUPS][2]) {
  const int lane = lane_id(), row = lane >> 2, quarter = lane & 3;
  const u16* scales = (const u16*)(stage + 2048);
#pragma unroll
  for (int g = 0; g < GROUPS; ++g) {
    const int byte = g * (GROUP * BITS / 8) + quarter * (WORDS * 4);
    const char* from = stage + row * 128 + (((byte >> 4) ^ swizzle(row)) << 4) + (byte & 15);
    u32 low[WORDS], high[WORDS];
    if constexpr (WORDS == 4) {
      const uint4 p = *(const uint4*)from, q = *(const uint4*)(from + 1024);
      low[0] = p.x, low[1] = p.y, low[2] = p.z, low[3] = p.w;
      high[0] = q.x, high[1] = q.y, high[2] = q.z, high[3] = q.w;
    } else if constexpr (WORDS == 2) {
      const uint2 p = *(const uint2*)from, q = *(const uint2*)(from + 1024);
      low[0] = p.x, low[1] = p.y, high[0] = q.x, high[1] = q.y;
    } else {
      low[0] = *(const u32*)from, high[0] = *(const u32*)(from + 1024);
    }
    float products[COLS][4] = {};
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      const int word = s / PAIRS, pair = 2 * (s % PAIRS);
      const u32 a[4] = {
          decode(low[word], pair), decode(high[word], pair), decode(low[word], pair + 1), decode(high[word], pair + 1)};
#pragma unroll
      for (int c = 0; c < COLS; ++c) mma(products[c], a, b[c][g][s][0], b[c][g][s][1]);
    }
    const float s0 = widen(scales[row * GROUPS + g]), s1 = widen(scales[(row + 8) * GROUPS + g]);
    const float z0 = widen(scales[(row + 16) * GROUPS + g]) + SHIFT * s0;
    const float z1 = widen(scales[(row + 24) * GROUPS + g]) + SHIFT * s1;
#pragma unroll
    for (int c = 0; c < COLS; ++c) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums[c][i] += (i < 2 ? s0 : s1) * products[c][i] + (i < 2 ? z0 : z1) * x_sums[c][g][i & 1];
      }
    }
  }
}

// Adds up the warps' sums and writes them.
__device__ __forceinline__ void finish(char* shared, const Job& job, const float (&sums)[TILES][COLS][4], int m) {
  float4* all = (float4*)shared;
  wait_copies<0>();
  sync_block();
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
#pragma unroll
    for (int c = 0; c < COLS; ++c) {
      all[((warp_id() * TILES + t) * COLS + c) * 32 + lane_id()] =
          float4{sums[t][c][0], sums[t][c][1], sums[t][c][2], sums[t][c][3]};
    }
  }
  sync_block();
  for (int at = thread_id(); at < TILES * COLS * 32; at += WARPS * 32) {
    float4 total = all[at];
    for (int w = 1; w < WARPS; ++w) {
      const float4 part = all[w * TILES * COLS * 32 + at];
      total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
    }
    const int lane = at & 31, c = (at >> 5) % COLS, t = (at >> 5) / COLS;
    const int n = job.row + t * 16 + (lane >> 2), row = c * 8 + 2 * (lane & 3);
    if (row < m) {
      job.y[(long)row * job.n + n] = narrow(total.x);
      job.y[(long)row * job.n + n + 8] = narrow(total.z);
    }
    if (row + 1 < m) {
      job.y[(long)(row + 1) * job.n + n] = narrow(total.y);
      job.y[(long)(row + 1) * job.n + n + 8] = narrow(total.w);
    }
  }
}

// One block: TILES * 16 weight rows from job.row on, all rows of x.
__device__ __forceinline__ void run(char* shared, const Job& job, const u16* x, int m, int k) {
  char* ring = shared + warp_id() * (STAGES * STAGE_BYTES);
  const int chunks = (k + CHUNK - 1) / CHUNK;
  const int mine = chunks > warp_id() ? (chunks - warp_id() + WARPS - 1) / WARPS : 0;
  const int stages = mine * TILES;
  float sums[TILES][COLS][4] = {};

  auto fetch_stage = [&](int i) {
    if (i < stages) {
      int tile = i % TILES;
      opaque(tile);
      fetch(ring + (i & (STAGES - 1)) * STAGE_BYTES, job, tile, (warp_id() + i / TILES * WARPS) * CHUNK, k);
    }
    commit_copies();
  };
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) fetch_stage(i);

  for (int chunk = 0; chunk < mine; ++chunk) {
    u32 b[COLS][GROUPS][STEPS][2];
    load_x(b, x, (warp_id() + chunk * WARPS) * CHUNK, k, m);
    float x_sums[COLS][GROUPS][2];
#pragma unroll
    for (int c = 0; c < COLS; ++c) {
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) {
        const u32 ones[4] = {ONES, ONES, ONES, ONES};
        float total[4] = {};
#pragma unroll
        for (int s = 0; s < STEPS; ++s) mma(total, ones, b[c][g][s][0], b[c][g][s][1]);
        x_sums[c][g][0] = total[0], x_sums[c][g][1] = total[1];
      }
    }
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      const int i = chunk * TILES + t;
      wait_copies<STAGES - 2>();
      // All lanes have left the slot that is filled next, and see what the others copied.
      sync_warp();
      fetch_stage(i + STAGES - 1);
      multiply(sums[t], ring + (i & (STAGES - 1)) * STAGE_BYTES, b, x_sums);
    }
  }
  finish(shared, job, sums, m);
}

}  // namespace dspark_qmm
