// The layers of a Llama-like decoder for up to 8 * COLS rows in one launch, what a target's forward (stack_target.cu) and a drafter's
// round (stack_draft.cu) share: of a small model a forward is hundreds of launches, each shorter than the pause in front of it. As
// many blocks as the device has multiprocessors stay for the whole of it and wait for one another where a step needs what others
// computed.
//
// The weights are the 16-row operand of the tensor cores and the rows of tokens the 8-column one, as in qmm.cu; here they are
// floats of 16 bits, or integers of 8 with scale and bias for each 32, stored in the order in which lanes want them (tiles.py), so
// that a lane's part of a piece of 16 rows is one load of 16 bytes. The warps of a tile share its columns. A warp asks for its
// weights before it waits for the others, for they do not depend on them. Sums, hidden states and scores are float32; what enters
// a product is 16 bits wide. No number of a row depends on which rows came with it, nor on how many.
//
// Keys and values of all layers lie in one buffer [2 LAYERS, KV_HEADS, room, D] and are written where they lie, behind what is held.
//
// Set in front of this text: HIDDEN, HEADS, KV_HEADS, D (columns a head), MLP, LAYERS, BITS (of a weight: 16, 8), VOCAB (rows of the
// head), TAPPED (layers whose output is given), COLS, WARPS, BLOCKS, SPLITS (blocks that share a head's keys), HALF (1: float16, 0:
// bfloat16), EPS, SCALE (of scores, in powers of 2), QK_NORM (queries and keys are normed), CAUSAL (a row sees keys up to its own,
// else all).

#ifndef DSPARK_SHIM
namespace dspark_stack {

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

__device__ __forceinline__ int lane_id() { return threadIdx.x & 31; }
__device__ __forceinline__ int warp_id() { return threadIdx.x >> 5; }
__device__ __forceinline__ int thread_id() { return threadIdx.x; }
__device__ __forceinline__ int block_id() { return blockIdx.x; }
__device__ __forceinline__ void sync_block() { __syncthreads(); }
__device__ __forceinline__ float never() { return __int_as_float(0xff800000); }
__device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ float power2(float x) { return exp2f(x); }
__device__ __forceinline__ float root(float x) { return rsqrtf(x); }
__device__ __forceinline__ float across(float value, int distance) {
  return __shfl_xor_sync(0xffffffffu, value, distance);
}

__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if HALF
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 8 x 8 numbers of 16 bits, a row in 4 lanes, columns and rows exchanged.
__device__ __forceinline__ u32 turned(u32 value) {
  u32 out;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(value));
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

__device__ __forceinline__ u32 pair(float low, float high) {
  u32 out;
#if HALF
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
#else
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
#endif
  return out;
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

__device__ __forceinline__ u16 narrow(float value) { return (u16)pair(value, 0.0f); }
__device__ __forceinline__ u32 low_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x5410); }
__device__ __forceinline__ u32 high_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x7632); }

// Weights: read once, by one warp.
__device__ __forceinline__ uint4 load_weights(const uint4* from) {
  uint4 out;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w)
               : "l"(from));
  return out;
}
__device__ __forceinline__ uint2 load_scales(const uint2* from) {
  uint2 out;
  asm volatile("ld.global.nc.v2.u32 {%0,%1}, [%2];" : "=r"(out.x), "=r"(out.y) : "l"(from));
  return out;
}
// What other blocks wrote: from where all see the same.
__device__ __forceinline__ uint4 load16(const void* from) { return __ldcg((const uint4*)from); }
__device__ __forceinline__ uint2 load8(const void* from) { return __ldcg((const uint2*)from); }
__device__ __forceinline__ float4 load_floats(const float* from) { return __ldcg((const float4*)from); }
__device__ __forceinline__ float2 load_two(const float* from) { return __ldcg((const float2*)from); }
__device__ __forceinline__ float load_float(const float* from) { return __ldcg(from); }

// One more block has done a step. All its threads call it.
__device__ __forceinline__ void arrive(u32* counter) {
  __syncthreads();
  if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

// Until `count` blocks have done it, and what they wrote is seen. Half a minute of asking, and the launch fails: some block has no
// place on the device.
__device__ __forceinline__ void await(u32* counter, u32 count) {
  if (threadIdx.x == 0) {
    u32 seen, asked = 0;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
      if (++asked == 1u << 26) __trap();
    } while (seen < count);
  }
  __syncthreads();
}

// The number of those that left before.
__device__ __forceinline__ u32 leave(u32* counter) {
  __threadfence();
  const u32 before = atomicAdd(counter, 1u);
  __threadfence();
  return before;
}

__device__ __forceinline__ void put_larger(u64* to, u64 value) { atomicMax(to, value); }
__device__ __forceinline__ u64 load_key(const u64* from) { return __ldcg(from); }
__device__ __forceinline__ u64 across_key(u64 value, int distance) {
  return __shfl_xor_sync(0xffffffffu, value, distance);
}
__device__ __forceinline__ u32 bits_of(float value) { return __float_as_uint(value); }

extern __shared__ uint4 dspark_shared[];
__device__ __forceinline__ char* shared_memory() { return (char*)dspark_shared; }
#else
namespace dspark_stack {
#endif

constexpr int ROWS = 8 * COLS;
constexpr int THREADS = 32 * WARPS;
constexpr int QUERY = HEADS * D, KEYS = KV_HEADS * D;
constexpr int DEEP = BITS == 8 ? 8 : 12;  // pieces of weights that a warp has asked for at once

// A piece of a matrix has 16 rows and so many columns, and so many loads of 16 bytes.
constexpr int COLUMNS = BITS == 8 ? 32 : 16, UNITS = BITS == 8 ? 36 : 32;

constexpr int HIDDEN_TILES = HIDDEN / 16, QKV_TILES = (QUERY + 2 * KEYS) / 16, MLP_TILES = MLP / 16, GROUPED = 8 * WARPS;
constexpr int VOCAB_TILES = (VOCAB + GROUPED - 1) / GROUPED * (WARPS / 2);  // with empty ones behind

// Pieces of a tile of 16 rows, and where matrices begin, in pieces.
constexpr int OF_HIDDEN = HIDDEN / COLUMNS, OF_QUERY = QUERY / COLUMNS, OF_MLP = MLP / COLUMNS;
constexpr int QKV_AT = 0, O_AT = QKV_TILES * OF_HIDDEN, MLP_AT = O_AT + HIDDEN_TILES * OF_QUERY;
constexpr int DOWN_AT = MLP_AT + 2 * MLP_TILES * OF_HIDDEN, LAYER = DOWN_AT + HIDDEN_TILES * OF_MLP;
// Where vectors begin: those of a layer, the last norm, the turns' frequencies.
constexpr int NORM_OF_MLP = HIDDEN, QUERY_NORM = 2 * HIDDEN, KEY_NORM = QUERY_NORM + D;
constexpr int LAYER_VECTORS = 2 * HIDDEN + (QK_NORM ? 2 * D : 0);
constexpr int LAST_NORM = LAYERS * LAYER_VECTORS, FREQUENCIES = LAST_NORM + HIDDEN;

// The steps of a layer that others wait for, and how many blocks each has; the blocks of a step begin at its own one, so that most
// can fetch what they need next while others work.
__device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }
constexpr int STEPS_OF_LAYER = 5 + QK_NORM, APART = 8;  // counters stand in sectors of their own
constexpr int HEAD_GROUPS = WARPS / 2;  // tiles of the vocabulary that a block takes at once
constexpr int ENDING = (BLOCKS - HIDDEN_TILES % BLOCKS) % BLOCKS;  // the first block of those that hold hidden states

// What blocks share besides weights and caches. EXTRA counters are for what comes before and behind the layers.
struct Scratch {
  u32 counters[APART * (LAYERS * STEPS_OF_LAYER + EXTRA)], left;
  alignas(16) float state[ROWS * HIDDEN];             // hidden states
  alignas(16) float squares[HIDDEN_TILES * ROWS];       // of each 16 of their columns
  alignas(16) float raw[QK_NORM ? ROWS * (QUERY + KEYS) : 4];
  alignas(16) float most[HEADS * SPLITS * ROWS * 2];    // of a head's scores, and the sum of their weights
  alignas(16) float part[HEADS * SPLITS * ROWS * D];    // values so weighted
  alignas(16) u16 queries[ROWS * QUERY];
  alignas(16) u16 active[ROWS * MLP];
  alignas(16) u64 best[ROWS];  // the largest logit of each row, or of each slot that is drafted
};

// Larger for a larger number, and of equal ones for the first place: the largest is an argmax.
__device__ __forceinline__ u64 key_of(float value, int place) {
  const u32 bits = bits_of(value + 0.0f);  // so that zero is one number
  return ((u64)(bits & 0x80000000u ? ~bits : bits | 0x80000000u) << 32) | (0xffffffffu - (u32)place);
}
__device__ __forceinline__ int place_of(u64 key) { return (int)(0xffffffffu - (u32)key); }
__device__ __forceinline__ u64 better(u64 a, u64 b) { return a > b ? a : b; }

// held: tokens in the caches; origin: the position of the first of them.
struct Job {
  const uint4* weights;
  const float* vectors;
  Scratch* scratch;
  u16* cache;
  u16* taps;
  int rows, held, room, origin;
};

// ---- products -------------------------------------------------------------------------------------------------------------

constexpr u32 ONES = HALF ? 0x3C003C00u : 0x3F803F80u;

// Bytes 0 and 2 (pair 0) or 1 and 3 of a word less 128, as two 16-bit floats.
__device__ __forceinline__ u32 decode(u32 word, int pair) {
  word >>= 8 * pair;
#if HALF
  return add2((word & 0x00FF00FFu) | 0x64006400u, 0xE480E480u);
#else
  // 7 bits fit into the mantissa of 128; the eighth chooses what is taken off: 128 or 256.
  return add2((word & 0x007F007Fu) | 0x43004300u, (word & 0x00800080u) ^ 0xC380C380u);
#endif
}

// What a lane has of a piece: 8 weights of 16 bits; or 16 of 8 bits, and scale and bias of its two rows (16 bits each).
struct Piece {
  uint4 words;
  uint2 scales;
};

__device__ __forceinline__ Piece load_piece(const uint4* piece) {
  Piece out;
  out.words = load_weights(piece + lane_id());
  if constexpr (BITS == 8) out.scales = load_scales((const uint2*)(piece + 32) + (lane_id() >> 2));
  return out;
}

// Products with a piece. A word of 8-bit weights is two pairs of neighbours; they are multiplied as integers about 0, and scale and
// bias applied to the sums of their 32 columns.
template <class X>
__device__ __forceinline__ void multiply_piece(
    float (&sums)[COLS][4], const Piece& piece, const typename X::Raw (&raw)[COLUMNS / 16][COLS], const X& x) {
  if constexpr (BITS == 16) {
    const u32 a[4] = {piece.words.x, piece.words.y, piece.words.z, piece.words.w};
#pragma unroll
    for (int c = 0; c < COLS; ++c) {
      const uint2 b = x.pairs(raw[0][c], c);
      mma(sums[c], a, b.x, b.y);
    }
  } else {
    const u32 words[4] = {piece.words.x, piece.words.y, piece.words.z, piece.words.w};
    const u32 ones[4] = {ONES, ONES, ONES, ONES};
    float products[COLS][4] = {}, totals[COLS][4] = {};
#pragma unroll
    for (int half = 0; half < COLUMNS / 16; ++half) {
      const u32 near = words[2 * half], far = words[2 * half + 1];
      const u32 a[4] = {decode(near, 0), decode(far, 0), decode(near, 1), decode(far, 1)};
#pragma unroll
      for (int c = 0; c < COLS; ++c) {
        const uint2 b = x.pairs(raw[half][c], c);
        mma(products[c], a, b.x, b.y);
        mma(totals[c], ones, b.x, b.y);
      }
    }
    const float s0 = widen((u16)piece.scales.x), s1 = widen((u16)piece.scales.y);
    const float z0 = widen((u16)(piece.scales.x >> 16)) + 128.0f * s0;
    const float z1 = widen((u16)(piece.scales.y >> 16)) + 128.0f * s1;
#pragma unroll
    for (int c = 0; c < COLS; ++c) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[c][i] += (i < 2 ? s0 : s1) * products[c][i] + (i < 2 ? z0 : z1) * totals[c][i & 1];
    }
  }
}

// A warp's sums over its columns of a tile, for the first `rows` of x: every PARTS-th piece of STEPS, beginning with its own.
template <int STEPS, int PARTS, class X, class Wait>
__device__ __forceinline__ void multiply(float (&sums)[COLS][4], const uint4* tile, int rows, X& x, Wait wait) {
  constexpr int COUNT = (STEPS + PARTS - 1) / PARTS, AHEAD = smaller(COUNT, DEEP);
  // Pieces whose x is asked for at once.
  constexpr int TOGETHER = BITS == 8 && AHEAD % 4 == 0 ? 4 : AHEAD;
  const int own = warp_id() % PARTS;
  Piece pieces[AHEAD];
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) {
    if (own + i * PARTS < STEPS) pieces[i] = load_piece(tile + (own + i * PARTS) * UNITS);
  }
  wait();
#pragma unroll
  for (int c = 0; c < COLS; ++c) sums[c][0] = sums[c][1] = sums[c][2] = sums[c][3] = 0.0f;
#pragma unroll
  for (int first = 0; first < COUNT; first += TOGETHER) {
    typename X::Raw raw[TOGETHER][COLUMNS / 16][COLS];
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) {
      const int step = own + (first + i) * PARTS;
#pragma unroll
      for (int half = 0; half < COLUMNS / 16; ++half) {
#pragma unroll
        for (int c = 0; c < COLS; ++c) {
          const int row = 8 * c + (lane_id() >> 2), column = COLUMNS * step + 16 * half + 4 * (lane_id() & 3);
          raw[i][half][c] = {};
          if (first + i < COUNT && step < STEPS && row < rows) raw[i][half][c] = x.load(row, column);
        }
      }
    }
    if (first == 0) x.ready();
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) {
      const int step = own + (first + i) * PARTS, next = step + AHEAD * PARTS;
      if (first + i < COUNT && step < STEPS) {
        const Piece piece = pieces[(first + i) % AHEAD];
        if (first + i + AHEAD < COUNT && next < STEPS) pieces[(first + i) % AHEAD] = load_piece(tile + next * UNITS);
        multiply_piece(sums, piece, raw[i], x);
      }
    }
  }
}

__device__ __forceinline__ void keep_sums(const float (&sums)[COLS][4]) {
  float4* all = (float4*)shared_memory();
#pragma unroll
  for (int c = 0; c < COLS; ++c) {
    all[(warp_id() * COLS + c) * 32 + lane_id()] = float4{sums[c][0], sums[c][1], sums[c][2], sums[c][3]};
  }
  sync_block();
}

// A tile's sums over all its columns: of weight rows lane / 4 and lane / 4 + 8, for two rows of tokens each.
template <int PARTS>
__device__ __forceinline__ void all_sums(float (&sums)[4], int group, int c) {
  const float4* all = (const float4*)shared_memory();
  sums[0] = sums[1] = sums[2] = sums[3] = 0.0f;
#pragma unroll
  for (int w = 0; w < PARTS; ++w) {
    const float4 part = all[((group * PARTS + w) * COLS + c) * 32 + lane_id()];
    sums[0] += part.x, sums[1] += part.y, sums[2] += part.z, sums[3] += part.w;
  }
}

// A step that multiplies `jobs` tiles (GROUPS of them a block at once, each by WARPS / GROUPS warps), on blocks from `first` on. `end`
// is called with the job's number behind each; `wait` before what others computed is read, and told whether it is the block's first.
template <int STEPS, int GROUPS, class X, class Wait, class End>
__device__ __forceinline__ void product(
    const uint4* weights, int jobs, int first, u32* done, int rows, X x, Wait wait, End end) {
  constexpr int PARTS = WARPS / GROUPS;
  const int own = (block_id() + BLOCKS - first) % BLOCKS;
  if (own >= jobs) return;
  for (int job = own; job < jobs; job += BLOCKS) {
    float sums[COLS][4];
    multiply<STEPS, PARTS>(sums, weights + (long long)(job * GROUPS + warp_id() / PARTS) * STEPS * UNITS, rows, x, [&] {
      wait(job, job == own);
    });
    if (job != own) sync_block();
    keep_sums(sums);
    end(job);
  }
  if (done) arrive(done);
}

__device__ __forceinline__ uint2 two_pairs(float4 x) { return {pair(x.x, x.y), pair(x.z, x.w)}; }

// One over the root of the mean square of a row, which four lanes find together.
__device__ __forceinline__ float shrunk(const float* squares, int row) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < (HIDDEN_TILES + 3) / 4; ++i) {
    const int tile = 4 * i + (lane_id() & 3);
    if (tile < HIDDEN_TILES) sum += load_float(squares + tile * ROWS + row);
  }
  sum += across(sum, 1);
  sum += across(sum, 2);
  return root(sum / HIDDEN + EPS);
}

// Rows of hidden states, normed.
struct Normed {
  struct Raw {
    float4 x, weight;
  };
  const float *state, *squares, *weight;
  float by[COLS];
  __device__ __forceinline__ void ready() {
#pragma unroll
    for (int c = 0; c < COLS; ++c) by[c] = shrunk(squares, 8 * c + (lane_id() >> 2));
  }
  __device__ __forceinline__ Raw load(int row, int column) const {
    return {load_floats(state + row * HIDDEN + column), *(const float4*)(weight + column)};
  }
  __device__ __forceinline__ uint2 pairs(const Raw& raw, int c) const {
    return two_pairs(
        {raw.x.x * by[c] * raw.weight.x, raw.x.y * by[c] * raw.weight.y, raw.x.z * by[c] * raw.weight.z,
         raw.x.w * by[c] * raw.weight.w});
  }
};

// The same, normed by the whole block together and kept in its memory.
struct Staged {
  using Raw = uint2;
  const u16* x;
  __device__ __forceinline__ void ready() {}
  __device__ __forceinline__ Raw load(int row, int column) const { return *(const uint2*)(x + row * HIDDEN + column); }
  __device__ __forceinline__ uint2 pairs(const Raw& raw, int) const { return raw; }
};

__device__ __forceinline__ void stage(u16* to, float* by, const Scratch& s, const float* weight) {
  if (warp_id() < COLS) {
    const int row = 8 * warp_id() + (lane_id() >> 2);
    const float own = shrunk(s.squares, row);
    if ((lane_id() & 3) == 0) by[row] = own;
  }
  sync_block();
  for (int at = thread_id(); at < ROWS * (HIDDEN / 4); at += THREADS) {
    const int row = at / (HIDDEN / 4), column = 4 * (at % (HIDDEN / 4));
    const float4 x = load_floats(s.state + row * HIDDEN + column), w = *(const float4*)(weight + column);
    const float shrink = by[row];
    *(uint2*)(to + row * HIDDEN + column) =
        two_pairs({x.x * shrink * w.x, x.y * shrink * w.y, x.z * shrink * w.z, x.w * shrink * w.w});
  }
  sync_block();
}

// What attention's blocks left of each head, put together.
struct Attended {
  using Raw = float4;
  const Scratch& s;
  int splits;
  __device__ __forceinline__ void ready() {}
  __device__ __forceinline__ Raw load(int row, int column) const {
    const int head = column / D;
    float best = never(), all = 0.0f;
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int first = 0; first < splits; first += 4) {
      float4 x[4];
      float2 most[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = (head * SPLITS + first + i) * ROWS + row;
        const bool is = first + i < splits;
        most[i] = is ? load_two(s.most + 2 * at) : float2{never(), 0.0f};
        x[i] = is ? load_floats(s.part + at * D + column % D) : float4{0.0f, 0.0f, 0.0f, 0.0f};
      }
      const float before = best;
#pragma unroll
      for (int i = 0; i < 4; ++i) best = larger(best, most[i].x);
      const float shrink = power2(before - best);
      all *= shrink, sum.x *= shrink, sum.y *= shrink, sum.z *= shrink, sum.w *= shrink;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float by = power2(most[i].x - best);
        all += most[i].y * by;
        sum.x += x[i].x * by, sum.y += x[i].y * by, sum.z += x[i].z * by, sum.w += x[i].w * by;
      }
    }
    const float by = 1.0f / all;
    return {sum.x * by, sum.y * by, sum.z * by, sum.w * by};
  }
  __device__ __forceinline__ uint2 pairs(const Raw& raw, int) const { return two_pairs(raw); }
};

struct Active {
  using Raw = uint2;
  const u16* x;
  __device__ __forceinline__ void ready() {}
  __device__ __forceinline__ Raw load(int row, int column) const { return load8(x + row * MLP + column); }
  __device__ __forceinline__ uint2 pairs(const Raw& raw, int) const { return raw; }
};

// ---- the steps ------------------------------------------------------------------------------------------------------------

// A number of a matrix that is stored in pieces, `steps` of them in a tile.
__device__ __forceinline__ float number(const uint4* matrix, int row, int column, int steps) {
  const int r = row & 7, half = (row >> 3) & 1, quarter = (column >> 2) & 3;
  const char* piece = (const char*)(matrix + ((long long)(row >> 4) * steps + column / COLUMNS) * UNITS);
  if constexpr (BITS == 16) {
    const int b = (column >> 1) & 1;
    return widen(((const u16*)piece)[(r * 4 + quarter) * 8 + (b * 2 + half) * 2 + (column & 1)]);
  } else {
    const int word = (r * 4 + quarter) * 4 + 2 * ((column >> 4) & 1) + half, place = (column & 1) * 2 + ((column >> 1) & 1);
    const u16* scale = (const u16*)(piece + 512) + (r * 2 + half) * 2;
    const float whole = widen(scale[0]) * (float)((const unsigned char*)piece)[4 * word + place] + widen(scale[1]);
    return widen(narrow(whole));
  }
}

__device__ __forceinline__ void put_tap(const Job& job, int layer, int row, int column, float value) {
  constexpr int tapped[] = {TAPPED, -1};
  constexpr int count = sizeof(tapped) / sizeof(int) - 1;
#pragma unroll
  for (int i = 0; i < count; ++i) {
    if (tapped[i] == layer) job.taps[((long long)row * count + i) * HIDDEN + column] = narrow(value);
  }
}

// Hidden states of `rows` rows to begin with, `value(row, column)` of each; of the others zero.
template <class Value>
__device__ __forceinline__ void begin(const Job& job, Value value, u32* done) {
  Scratch& s = *job.scratch;
  const int own = (block_id() + BLOCKS - ENDING) % BLOCKS;
  if (own >= HIDDEN_TILES) return;
  for (int tile = own; tile < HIDDEN_TILES; tile += BLOCKS) {
    for (int at = thread_id(); at < 16 * ROWS; at += THREADS) {
      const int row = at >> 4, column = 16 * tile + (at & 15);
      const float x = row < job.rows ? value(row, column) : 0.0f;
      s.state[row * HIDDEN + column] = x;
      float square = x * x;
#pragma unroll
      for (int distance = 1; distance < 16; distance *= 2) square += across(square, distance);
      if ((at & 15) == 0) s.squares[tile * ROWS + row] = square;
    }
  }
  if (done) arrive(done);
}

// Turns the pair of columns i and i + D / 2 to a row's position.
__device__ __forceinline__ void turn(float& low, float& high, int position, float frequency) {
  float sine, cosine;
  sincosf((float)position * frequency, &sine, &cosine);
  const float a = low, b = high;
  low = a * cosine - b * sine;
  high = a * sine + b * cosine;
}

// Keys (0) or values (1) of a layer, from a column of the buffer on.
__device__ __forceinline__ u16* cached(const Job& job, int layer, int which, int head, int at) {
  return job.cache + (((long long)(2 * layer + which) * KV_HEADS + head) * job.room + at) * D;
}

// A tile of queries or keys holds pairs: weight rows r and r + 8 are columns i and i + D / 2 of a head.
__device__ __forceinline__ void end_qkv(const Job& job, int layer, int tile, int c, const float (&sums)[4]) {
  Scratch& s = *job.scratch;
  const int r = lane_id() >> 2, quarter = lane_id() & 3;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int row = 8 * c + 2 * quarter + n;
    if (row >= job.rows) continue;
    float low = sums[n], high = sums[n + 2];
    if (tile < (QUERY + KEYS) / 16) {
      const int head = tile / (D / 16), i = tile % (D / 16) * 8 + r;
      if constexpr (QK_NORM) {
        float* to = s.raw + (row * (HEADS + KV_HEADS) + head) * D + i;
        to[0] = low, to[D / 2] = high;
        continue;
      }
      turn(low, high, job.origin + job.held + row, job.vectors[FREQUENCIES + i]);
      if (head < HEADS) {
        u16* to = s.queries + row * QUERY + head * D + i;
        to[0] = narrow(low * SCALE), to[D / 2] = narrow(high * SCALE);
      } else {
        u16* to = cached(job, layer, 0, head - HEADS, job.held + row) + i;
        to[0] = narrow(low), to[D / 2] = narrow(high);
      }
    } else {
      const int at = 16 * tile - QUERY - KEYS + r;
      u16* to = cached(job, layer, 1, at / D, job.held + row) + at % D;
      to[0] = narrow(low), to[8] = narrow(high);
    }
  }
}

// A head of a row, normed and turned: by a warp.
__device__ __forceinline__ void norm_head(
    const Job& job, const float* from, const float* weight, int position, float scale, u16* to) {
  constexpr int EACH = D / 64;
  float low[EACH], high[EACH], sum = 0.0f;
#pragma unroll
  for (int e = 0; e < EACH; ++e) {
    low[e] = load_float(from + 32 * e + lane_id()), high[e] = load_float(from + 32 * e + lane_id() + D / 2);
    sum += low[e] * low[e] + high[e] * high[e];
  }
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) sum += across(sum, distance);
  const float by = root(sum / D + EPS);
#pragma unroll
  for (int e = 0; e < EACH; ++e) {
    const int i = 32 * e + lane_id();
    low[e] *= by * weight[i], high[e] *= by * weight[i + D / 2];
    turn(low[e], high[e], position, job.vectors[FREQUENCIES + i]);
    to[i] = narrow(low[e] * scale), to[i + D / 2] = narrow(high[e] * scale);
  }
}

// Queries and keys of all rows, where they are normed before they are turned.
__device__ __forceinline__ void norm_heads(const Job& job, int layer, const float* vectors) {
  Scratch& s = *job.scratch;
  constexpr int BOTH = HEADS + KV_HEADS;
  for (int at = block_id() * WARPS + warp_id(); at < job.rows * BOTH; at += BLOCKS * WARPS) {
    const int row = at / BOTH, head = at % BOTH;
    const bool asks = head < HEADS;
    norm_head(
        job, s.raw + (row * BOTH + head) * D, vectors + (asks ? QUERY_NORM : KEY_NORM), job.origin + job.held + row,
        asks ? SCALE : 1.0f, asks ? s.queries + row * QUERY + head * D : cached(job, layer, 0, head - HEADS, job.held + row));
  }
}

// Hidden states of 16 columns: always a block's own, so it needs to wait for nobody.
__device__ __forceinline__ void old_state(float (&old)[4], const Scratch& s, int tile, int c) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = 8 * c + 2 * (lane_id() & 3) + (i & 1), column = 16 * tile + (lane_id() >> 2) + 8 * (i >> 1);
    old[i] = load_float(s.state + row * HIDDEN + column);
  }
}

// New hidden states, and their squares.
__device__ __forceinline__ void end_state(
    const Job& job, int layer, int tile, int c, const float (&old)[4], const float (&sums)[4]) {
  Scratch& s = *job.scratch;
  const int r = lane_id() >> 2, quarter = lane_id() & 3;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int row = 8 * c + 2 * quarter + n;
    float* to = s.state + row * HIDDEN + 16 * tile + r;
    const float low = old[n] + sums[n], high = old[n + 2] + sums[n + 2];
    to[0] = low, to[8] = high;
    float square = low * low + high * high;
    square += across(square, 4);
    square += across(square, 8);
    square += across(square, 16);
    if (r == 0) s.squares[tile * ROWS + row] = square;
    if (layer >= 0 && row < job.rows) {
      put_tap(job, layer, row, 16 * tile + r, low);
      put_tap(job, layer, row, 16 * tile + r + 8, high);
    }
  }
}

__device__ __forceinline__ void end_mlp(const Job& job, int tile, int c) {
  float gate[4], up[4];
  all_sums<WARPS / 2>(gate, 0, c);
  all_sums<WARPS / 2>(up, 1, c);
  const int r = lane_id() >> 2, quarter = lane_id() & 3;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = 8 * c + 2 * quarter + (i & 1), column = 16 * tile + r + 8 * (i >> 1);
    const float value = gate[i] / (1.0f + power2(-1.4426950408889634f * gate[i])) * up[i];
    job.scratch->active[row * MLP + column] = narrow(value);
  }
}

// Keys that a block's warps take at once, 16 each. A head's keys are dealt out to SPLITS blocks by as many; where there are few,
// fewer blocks have any.
constexpr int DEALT = 16 * WARPS;
__device__ __forceinline__ int splits_of(const Job& job) { return smaller((job.held + job.rows + DEALT - 1) / DEALT, SPLITS); }

// A block's keys of one head.
__device__ __forceinline__ void attend(const Job& job, int layer, int own) {
  Scratch& s = *job.scratch;
  const int head = own % HEADS, split = own / HEADS, lane = lane_id(), r = lane >> 2, quarter = lane & 3;
  const int seen = job.held + job.rows, group = head / (HEADS / KV_HEADS);
  const u16 *keys = cached(job, layer, 0, group, 0), *values = cached(job, layer, 1, group, 0);
  uint4 q[COLS][D / 32];
#pragma unroll
  for (int c = 0; c < COLS; ++c) {
#pragma unroll
    for (int j = 0; j < D / 32; ++j) q[c][j] = load16(s.queries + (8 * c + r) * QUERY + head * D + 32 * j + 8 * quarter);
  }
  float most[COLS][2], total[COLS][2], sums[COLS][D / 16][4];
#pragma unroll
  for (int c = 0; c < COLS; ++c) {
    most[c][0] = most[c][1] = never();
    total[c][0] = total[c][1] = 0.0f;
#pragma unroll
    for (int i = 0; i < D / 4; ++i) sums[c][i / 4][i % 4] = 0.0f;
  }
  for (int first = DEALT * split + 16 * warp_id(); first < seen; first += DEALT * SPLITS) {
    uint4 k[2][D / 32], v[4][D / 64];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = first + r + 8 * i;
#pragma unroll
      for (int j = 0; j < D / 32; ++j) {
        k[i][j] = key < seen ? load16(keys + (long long)key * D + 32 * j + 8 * quarter) : uint4{0, 0, 0, 0};
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = first + 2 * quarter + (i & 1) + 8 * (i >> 1);
#pragma unroll
      for (int p = 0; p < D / 64; ++p) {
        v[i][p] = key < seen ? load16(values + (long long)key * D + 64 * p + 8 * r) : uint4{0, 0, 0, 0};
      }
    }
#pragma unroll
    for (int c = 0; c < COLS; ++c) {
      float score[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int j = 0; j < D / 32; ++j) {
        const u32 near[4] = {k[0][j].x, k[1][j].x, k[0][j].y, k[1][j].y};
        const u32 far[4] = {k[0][j].z, k[1][j].z, k[0][j].w, k[1][j].w};
        mma(score, near, q[c][j].x, q[c][j].y);
        mma(score, far, q[c][j].z, q[c][j].w);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = first + r + 8 * (i >> 1), last = CAUSAL ? job.held + 8 * c + 2 * quarter + (i & 1) : seen - 1;
        if (key > last) score[i] = never();
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        float best = larger(most[c][n], larger(score[n], score[n + 2]));
        best = larger(best, across(best, 4));
        best = larger(best, across(best, 8));
        best = larger(best, across(best, 16));
        // A row that has seen no key yet.
        const float base = best == never() ? 0.0f : best;
        const float shrink = power2(most[c][n] - base);
        most[c][n] = best;
        score[n] = power2(score[n] - base);
        score[n + 2] = power2(score[n + 2] - base);
        total[c][n] = total[c][n] * shrink + (score[n] + score[n + 2]);
#pragma unroll
        for (int t = 0; t < D / 16; ++t) sums[c][t][n] *= shrink, sums[c][t][n + 2] *= shrink;
      }
      const u32 b0 = turned(pair(score[0], score[1])), b1 = turned(pair(score[2], score[3]));
#pragma unroll
      for (int p = 0; p < D / 64; ++p) {
        const u32 words[4][4] = {
            {v[0][p].x, v[1][p].x, v[2][p].x, v[3][p].x}, {v[0][p].y, v[1][p].y, v[2][p].y, v[3][p].y},
            {v[0][p].z, v[1][p].z, v[2][p].z, v[3][p].z}, {v[0][p].w, v[1][p].w, v[2][p].w, v[3][p].w}};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const u32 a[4] = {
              low_halves(words[w][0], words[w][1]), high_halves(words[w][0], words[w][1]),
              low_halves(words[w][2], words[w][3]), high_halves(words[w][2], words[w][3])};
          mma(sums[c][4 * p + w], a, b0, b1);
        }
      }
    }
  }
  // The warps' sums together: 8 rows at a time.
  float* all = (float*)shared_memory();
  float* marks = all + WARPS * 8 * D;
#pragma unroll
  for (int c = 0; c < COLS; ++c) {
    if (c) sync_block();
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float sum = total[c][n];
      sum += across(sum, 4);
      sum += across(sum, 8);
      sum += across(sum, 16);
      const int row = 2 * quarter + n;
      if (r == 0) marks[(warp_id() * 8 + row) * 2] = most[c][n], marks[(warp_id() * 8 + row) * 2 + 1] = sum;
#pragma unroll
      for (int t = 0; t < D / 16; ++t) {
        float* to = all + (warp_id() * 8 + row) * D + 64 * (t / 4) + 8 * r + 2 * (t % 4);
        to[0] = sums[c][t][n], to[1] = sums[c][t][n + 2];
      }
    }
    sync_block();
    for (int at = thread_id(); at < 8 * D; at += THREADS) {
      const int row = at / D, column = at % D;
      float best = never(), weight = 0.0f, value = 0.0f;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) best = larger(best, marks[(w * 8 + row) * 2]);
      const float base = best == never() ? 0.0f : best;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        const float by = power2(marks[(w * 8 + row) * 2] - base);
        weight += marks[(w * 8 + row) * 2 + 1] * by;
        value += all[(w * 8 + row) * D + column] * by;
      }
      const int to = (head * SPLITS + split) * ROWS + 8 * c + row;
      s.part[to * D + column] = value;
      if (column == 0) s.most[2 * to] = best, s.most[2 * to + 1] = weight;
    }
  }
}

__device__ __forceinline__ void layer(const Job& job, int number, u32*& counter, int& before) {
  Scratch& s = *job.scratch;
  const uint4* weights = job.weights + (long long)number * LAYER * UNITS;
  const float* vectors = job.vectors + number * LAYER_VECTORS;
  const auto wait = [&] { await(counter, before); };
  const auto wait_once = [&](int, bool first) {
    if (first) wait();
  };
  const auto done = [&](int jobs) { counter += APART, before = smaller(jobs, BLOCKS); };

  // Queries, keys and values on the first blocks, attention behind them, the two matrices that end in hidden states at the end.
  constexpr int BEHIND = QKV_TILES % BLOCKS;
  float old[4];
  Normed normed{s.state, s.squares, vectors};
  product<OF_HIDDEN, 1>(
      weights + QKV_AT * UNITS, QKV_TILES, 0, counter + APART, job.rows, normed, wait_once, [&](int tile) {
        if (warp_id() >= COLS) return;
        float sums[4];
        all_sums<WARPS>(sums, 0, warp_id());
        end_qkv(job, number, tile, warp_id(), sums);
      });
  done(QKV_TILES);
  if constexpr (QK_NORM) {
    wait();
    norm_heads(job, number, vectors);
    arrive(counter + APART);
    done(BLOCKS);
  }
  const int own = (block_id() + BLOCKS - BEHIND) % BLOCKS, splits = splits_of(job), attending = HEADS * splits;
  if (own < attending) {
    wait();
    for (int i = own; i < attending; i += BLOCKS) {
      if (i != own) sync_block();
      attend(job, number, i);
    }
    arrive(counter + APART);
  }
  done(attending);
  product<OF_QUERY, 1>(
      weights + O_AT * UNITS, HIDDEN_TILES, ENDING, counter + APART, job.rows, Attended{s, splits},
      [&](int tile, bool first) {
        if (warp_id() < COLS) old_state(old, s, tile, warp_id());
        if (first) wait();
      },
      [&](int tile) {
        if (warp_id() >= COLS) return;
        float sums[4];
        all_sums<WARPS>(sums, 0, warp_id());
        end_state(job, -1, tile, warp_id(), old, sums);
      });
  done(HIDDEN_TILES);
  normed.weight = vectors + NORM_OF_MLP;
  product<OF_HIDDEN, 2>(
      weights + (long long)MLP_AT * UNITS, MLP_TILES, 0, counter + APART, job.rows, normed, wait_once, [&](int tile) {
        if (warp_id() < COLS) end_mlp(job, tile, warp_id());
      });
  done(MLP_TILES);
  product<OF_MLP, 1>(
      weights + (long long)DOWN_AT * UNITS, HIDDEN_TILES, ENDING, counter + APART, job.rows, Active{s.active},
      [&](int tile, bool first) {
        if (warp_id() < COLS) old_state(old, s, tile, warp_id());
        if (first) wait();
      },
      [&](int tile) {
        if (warp_id() >= COLS) return;
        float sums[4];
        all_sums<WARPS>(sums, 0, warp_id());
        end_state(job, number, tile, warp_id(), old, sums);
      });
  done(HIDDEN_TILES);
}

// Products of the last states, normed, with all rows of the head's matrix: `end(row, column, value, n)` is given each; of
// all that a lane is given with the same n % 2, the row is the same.
template <class End>
__device__ __forceinline__ void last_products(
    const Job& job, const uint4* table, u32* counter, int before, u32* done, End end) {
  u16* staged = (u16*)(shared_memory() + WARPS * COLS * 512);
  product<OF_HIDDEN, HEAD_GROUPS>(
      table, VOCAB_TILES / HEAD_GROUPS, 0, done, job.rows, Staged{staged},
      [&](int, bool first) {
        if (!first) return;
        await(counter, before);
        stage(staged, (float*)(staged + ROWS * HIDDEN), *job.scratch, job.vectors + LAST_NORM);
      },
      [&](int at) {
        for (int i = warp_id(); i < HEAD_GROUPS * COLS; i += WARPS) {
          const int group = i / COLS, c = i % COLS, tile = at * HEAD_GROUPS + group;
          float sums[4];
          all_sums<WARPS / HEAD_GROUPS>(sums, group, c);
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            const int row = 8 * c + 2 * (lane_id() & 3) + (n & 1), column = 16 * tile + (lane_id() >> 2) + 8 * (n >> 1);
            if (row < job.rows && column < VOCAB) end(row, column, sums[n], n);
          }
        }
      });
}

// The last block to leave runs `end`, and makes the counters ready for the next launch: all have seen them.
template <class End>
__device__ __forceinline__ void leave_all(Scratch& s, End end) {
  int* last = (int*)shared_memory();
  sync_block();
  if (thread_id() == 0) last[0] = leave(&s.left) == BLOCKS - 1;
  sync_block();
  if (!last[0]) return;
  if (thread_id() == 0) end();
  sync_block();
  for (int i = thread_id(); i < APART * (LAYERS * STEPS_OF_LAYER + EXTRA); i += THREADS) s.counters[i] = 0;
  if (thread_id() < ROWS) s.best[thread_id()] = 0;
  if (thread_id() == 0) s.left = 0;
}

}  // namespace dspark_stack
