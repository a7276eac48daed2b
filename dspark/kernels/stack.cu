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
// Floats are the form of small models, whose steps are short: a warp loads its x from where all blocks share it (`multiply`).
// Integers are that of large ones, whose steps are a stream of weights (`stream`): a block brings x into its memory once for all of
// its tiles of a step, and its warps go on from tile to tile without a pause.
//
// Keys and values of all layers lie in one buffer [2 LAYERS, KV_HEADS, room, D] and are written where they lie, behind what is held.
//
// Set in front of this text: HIDDEN, HEADS, KV_HEADS, D (columns a head), MLP, LAYERS, BITS (of a weight: 16, 8), VOCAB (rows of the
// head), TAPPED (layers whose output is given), COLS, WARPS, BLOCKS, SPLITS (blocks that share a head's keys), HALF (1: float16, 0:
// bfloat16), EPS, SCALE (of scores, in powers of 2), QK_NORM (queries and keys are normed), CAUSAL (a row sees keys up to its own,
// else all), MEMORY (bytes that a block may have of its own).

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

// a * b + c of two 16-bit numbers, rounded once. The smallest ones count.
__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) {
  u32 out;
#if HALF
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
#else
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
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
// Weights that will be read: brought as near as all multiprocessors share.
__device__ __forceinline__ void fetch(const uint4* from, u32 units) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(16 * units) : "memory");
#endif
}
// What other blocks wrote: from where all see the same.
__device__ __forceinline__ uint4 load16(const void* from) { return __ldcg((const uint4*)from); }
__device__ __forceinline__ uint2 load8(const void* from) { return __ldcg((const uint2*)from); }
__device__ __forceinline__ float4 load_floats(const float* from) { return __ldcg((const float4*)from); }
__device__ __forceinline__ float2 load_two(const float* from) { return __ldcg((const float2*)from); }
__device__ __forceinline__ float load_float(const float* from) { return __ldcg(from); }
// 16 bytes of it into a block's memory, or zeros. They take no registers on their way; a thread waits for those that it asked for.
__device__ __forceinline__ void copy16(uint4* to, const uint4* from, bool is) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"((u32)__cvta_generic_to_shared(to)), "l"(from), "r"(is ? 16 : 0)
               : "memory");
}
// The copies that a thread has asked for since it last called this are one group.
__device__ __forceinline__ void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all of a thread's groups but the last `n`, or fewer, are there.
template <int N = 0>
__device__ __forceinline__ void copied_but(int n) {
  if constexpr (N < 7) {
    if (n > N) return copied_but<N + 1>(n);
  }
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

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
// Whether attention norms its queries and keys itself, and nobody waits for that. It does so several times over.
constexpr bool NORMED_WHERE_USED = QK_NORM && BITS == 8;

// What blocks share besides weights and caches. EXTRA counters are for what comes before and behind the layers.
struct Scratch {
  u32 counters[APART * (LAYERS * STEPS_OF_LAYER + EXTRA)], left;
  alignas(16) float state[ROWS * HIDDEN];             // hidden states
  alignas(16) float squares[HIDDEN_TILES * ROWS];     // of each 16 of their columns (`square_at`)
  alignas(16) float raw[QK_NORM ? ROWS * (QUERY + KEYS) : 4];
  alignas(16) float most[HEADS * SPLITS * ROWS * 2];    // of a head's scores, and the sum of their weights
  alignas(16) float part[HEADS * SPLITS * ROWS * D];    // values so weighted
  alignas(16) u16 queries[ROWS * QUERY];
  alignas(32) u16 active[ROWS * MLP];
  alignas(32) u16 attended[BITS == 8 ? ROWS * QUERY : 8];
  alignas(32) u16 near[BITS == 8 ? ROWS * HIDDEN : 8];  // hidden states for the next product, not yet normed
  alignas(16) u32 heads[BITS == 8 ? HEADS : 4];  // blocks that have done their keys of a head
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

// Bytes 0 and 2 (pair 0) or 1 and 3 of a word less 128, in parts of UNIT, as two 16-bit floats. A byte alone is the float of so many
// smallest steps, whatever its upper bit: so one instruction makes it a number about zero.
constexpr float UNIT = HALF ? 512.0f : 128.0f;
__device__ __forceinline__ u32 decode(u32 word, int pair) {
  const u32 SCALE_UP = HALF ? 0x78007800u : 0x7E807E80u, HALF_RANGE = HALF ? 0xB400B400u : 0xBF80BF80u;
  return fma2(word >> 8 * pair & 0x00FF00FFu, SCALE_UP, HALF_RANGE);
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

// Products with a piece of floats.
template <class X>
__device__ __forceinline__ void multiply_piece(
    float (&sums)[COLS][4], const Piece& piece, const typename X::Raw (&raw)[COLS], const X& x) {
  const u32 a[4] = {piece.words.x, piece.words.y, piece.words.z, piece.words.w};
#pragma unroll
  for (int c = 0; c < COLS; ++c) {
    const uint2 b = x.pairs(raw[c], c);
    mma(sums[c], a, b.x, b.y);
  }
}

// A warp's sums over its columns of a tile, for the first `rows` of x: every PARTS-th piece of STEPS, beginning with its own.
template <int STEPS, int PARTS, class X, class Wait>
__device__ __forceinline__ void multiply(float (&sums)[COLS][4], const uint4* tile, int rows, X& x, Wait wait) {
  constexpr int COUNT = (STEPS + PARTS - 1) / PARTS, AHEAD = smaller(COUNT, DEEP);
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
  for (int first = 0; first < COUNT; first += AHEAD) {
    typename X::Raw raw[AHEAD][COLS];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const int step = own + (first + i) * PARTS;
#pragma unroll
      for (int c = 0; c < COLS; ++c) {
        const int row = 8 * c + (lane_id() >> 2), column = COLUMNS * step + 4 * (lane_id() & 3);
        raw[i][c] = {};
        if (first + i < COUNT && step < STEPS && row < rows) raw[i][c] = x.load(row, column);
      }
    }
    if (first == 0) x.ready();
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
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

// A tile's sums over all its columns: of weight rows lane / 4 and lane / 4 + 8, for two rows of tokens each. all: those of all warps.
template <int PARTS>
__device__ __forceinline__ void all_sums(float (&sums)[4], int group, int c, const float4* all) {
  sums[0] = sums[1] = sums[2] = sums[3] = 0.0f;
#pragma unroll
  for (int w = 0; w < PARTS; ++w) {
    const float4 part = all[((group * PARTS + w) * COLS + c) * 32 + lane_id()];
    sums[0] += part.x, sums[1] += part.y, sums[2] += part.z, sums[3] += part.w;
  }
}

// ---- a stream of 8-bit weights --------------------------------------------------------------------------------------------

// Pieces of `count` that a warp asks for at once: such that few places stay empty behind the last.
__device__ constexpr int ring_of(int count) {
  if (count <= DEEP) return count;
  int best = DEEP;
  for (int n = DEEP; 2 * n > DEEP; --n) {
    if ((count + n - 1) / n * n < (count + best - 1) / best * best) best = n;
  }
  return best;
}

// Where numbers of x are, both where blocks share them and in a block's memory: all rows of 32 columns together, and of a row's the
// eight together that a lane multiplies.
__device__ __forceinline__ int place_of_x(int row, int column) {
  return ((column >> 5) * ROWS + row) * 32 + ((column >> 2) & 3) * 8 + ((column >> 4) & 1) * 4 + (column & 3);
}

// A block's memory: sums, columns of x, totals of each 32 of them, and what rows are multiplied by.
__device__ constexpr int memory_of(int sums, int columns) { return sums + ROWS * (2 * columns + columns / 8 + 4); }
__device__ constexpr int jobs_at_once(int most, int columns) {
  while (most > 1 && memory_of(most * WARPS * COLS * 512, columns) > MEMORY) --most;
  return most;
}
__device__ constexpr int turns_at_once(int sums, int steps, int turn, int turns) {
  while (turns > 1 && memory_of(sums, 32 * smaller(steps, turns * turn)) > MEMORY) --turns;
  return turns;
}

// How a step goes: JOBS jobs of GROUPS tiles, each of STEPS pieces and multiplied by WARPS / GROUPS warps; ENDS warps end a job. In a
// turn a warp takes what it has asked for at once. Sums are kept of as many jobs as have warps to end them all at once. x is in a
// block's memory for so many turns.
template <int STEPS_, int GROUPS_, int JOBS_, int ENDS_>
struct Plan {
  static constexpr int STEPS = STEPS_, GROUPS = GROUPS_, JOBS = JOBS_, ENDS = ENDS_;
  static constexpr int PARTS = WARPS / GROUPS, COUNT = (STEPS + PARTS - 1) / PARTS;
  static constexpr int RING = ring_of(COUNT), TURN = RING * PARTS, TURNS = (COUNT + RING - 1) / RING;
  static constexpr bool FULL = STEPS % TURN == 0;
  // Whether there is a warp's i-th piece of a turn.
  __device__ static constexpr bool has(int turn, int i, int part) { return FULL || (turn * RING + i) * PARTS + part < STEPS; }
  static constexpr int BATCH = jobs_at_once(smaller((JOBS + BLOCKS - 1) / BLOCKS, WARPS / ENDS), 32 * smaller(STEPS, TURN));
  static constexpr int SUMS = BATCH * WARPS * COLS * 512;
  static constexpr int AT_ONCE = turns_at_once(SUMS, STEPS, TURN, TURNS);
  static constexpr int WIDTH = 32 * smaller(STEPS, AT_ONCE * TURN);
  static_assert(BITS == 16 || memory_of(SUMS, WIDTH) <= MEMORY, "a turn's columns of x do not fit into a block's memory");
};

// Turns by which weights are brought near before they are asked for.
constexpr int FETCHED = 3;

// Where a warp's next turn of pieces is, null behind the last: all jobs of a batch for the same columns of x, then the next ones.
template <class P>
struct Cursor {
  const uint4 *first, *at;
  int mine, job, turn, begin;
  __device__ __forceinline__ void go_on() {
    at += P::TURN * UNITS;
    ++turn;
    if (turn % P::AT_ONCE && turn < P::TURNS) return;
    const int from = (turn - 1) / P::AT_ONCE * P::AT_ONCE;
    if (++job == smaller(begin + P::BATCH, mine)) {
      if (turn == P::TURNS) begin = job, turn = 0;
      job = begin;
    } else {
      turn = from;
    }
    at = job < mine ? first + ((long long)job * BLOCKS * P::GROUPS * P::STEPS + turn * P::TURN) * UNITS : nullptr;
  }
};

// Products with a piece of integers. A word is two pairs of neighbours; they are multiplied as integers about 0, and scale and bias
// applied to the sums of their 32 columns.
__device__ __forceinline__ void multiply_bytes(float (&sums)[COLS][4], const Piece& piece, const uint4* x, const float* totals) {
  const u32 words[4] = {piece.words.x, piece.words.y, piece.words.z, piece.words.w};
  float products[COLS][4] = {};
  uint4 b[COLS];
#pragma unroll
  for (int c = 0; c < COLS; ++c) b[c] = x[32 * c];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const u32 near = words[2 * half], far = words[2 * half + 1];
    const u32 a[4] = {decode(near, 0), decode(far, 0), decode(near, 1), decode(far, 1)};
#pragma unroll
    for (int c = 0; c < COLS; ++c) mma(products[c], a, half ? b[c].z : b[c].x, half ? b[c].w : b[c].y);
  }
  const float s0 = UNIT * widen((u16)piece.scales.x), s1 = UNIT * widen((u16)piece.scales.y);
  const float z0 = widen((u16)(piece.scales.x >> 16)) + 128.0f / UNIT * s0;
  const float z1 = widen((u16)(piece.scales.y >> 16)) + 128.0f / UNIT * s1;
#pragma unroll
  for (int c = 0; c < COLS; ++c) {
    const float2 both = *(const float2*)(totals + 8 * c);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums[c][i] = (i < 2 ? z0 : z1) * (i & 1 ? both.y : both.x) + sums[c][i];
      sums[c][i] = (i < 2 ? s0 : s1) * products[c][i] + sums[c][i];
    }
  }
}

// Where the squares of a tile of a row are. A warp reads all of a row where x is brought into memory.
__device__ __forceinline__ int square_at(int tile, int row) { return BITS == 8 ? row * HIDDEN_TILES + tile : tile * ROWS + row; }

// One over the root of the mean square of a row, which a warp finds.
__device__ __forceinline__ float shrunk_by_warp(const float* squares, int row) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < (HIDDEN_TILES + 63) / 64; ++i) {
    const int tile = 64 * i + 2 * lane_id();
    if (tile < HIDDEN_TILES) {
      const float2 both = load_two(squares + square_at(tile, row));
      sum += both.x + both.y;
    }
  }
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) sum += across(sum, distance);
  return root(sum / HIDDEN + EPS);
}

// Two neighbours of a row of states, normed.
__device__ __forceinline__ u32 norm_two(u32 x, float by, float w0, float w1) {
  return pair(widen((u16)x) * by * w0, widen((u16)(x >> 16)) * by * w1);
}

// A warp asks for columns of x from a turn on, as many as a block has at once, each turn's in a group of copies: those that its own
// lanes multiply, and no others, but that warps of several groups share them out. `to`: where its lanes' first ones belong.
template <class P>
__device__ __forceinline__ void ask_for_x(const u16* x, int rows, int from, int part, int group, uint4* to) {
  const uint4* own = (const uint4*)x + (from * P::TURN + part) * 32 * COLS + lane_id();
#pragma unroll 1
  for (int turn = from; turn < smaller(from + P::AT_ONCE, P::TURNS); ++turn) {
#pragma unroll
    for (int i = 0; i < P::RING; ++i) {
      const int place = (turn - from) * P::TURN + i * P::PARTS;
      if (i % P::GROUPS != group || !P::has(turn, i, part)) continue;
#pragma unroll
      for (int c = 0; c < COLS; ++c) {
        const int at = (place * COLS + c) * 32;
        copy16(to + at, own + at, 8 * c + (lane_id() >> 2) < rows);
      }
    }
    end_group();
  }
}

// A turn's columns of x are there, all but the last `left` turns' being waited for; and so are their totals, of which a lane finds
// those that it needs itself.
template <class P, class X>
__device__ __forceinline__ void take_x(const X& x, int turn, int left, int part, int group, uint4* to, float* totals, const float* by) {
  copied_but(left);
  if constexpr (X::NORMED && HALF) {
#pragma unroll
    for (int i = 0; i < P::RING; ++i) {
      if (i % P::GROUPS != group || !P::has(turn, i, part)) continue;
      const float* weight = x.weight + 32 * (turn * P::TURN + i * P::PARTS + part) + 4 * (lane_id() & 3);
      const float4 w0 = *(const float4*)weight, w1 = *(const float4*)(weight + 16);
#pragma unroll
      for (int c = 0; c < COLS; ++c) {
        uint4& own = to[(i * P::PARTS * COLS + c) * 32];
        const float shrink = by[8 * c + (lane_id() >> 2)];
        own = uint4{
            norm_two(own.x, shrink, w0.x, w0.y), norm_two(own.y, shrink, w0.z, w0.w),
            norm_two(own.z, shrink, w1.x, w1.y), norm_two(own.w, shrink, w1.z, w1.w)};
      }
    }
  }
  if constexpr (P::GROUPS > 1) sync_block();
  constexpr u32 ONES = HALF ? 0x3C003C00u : 0x3F803F80u;
  const u32 ones[4] = {ONES, ONES, ONES, ONES};
#pragma unroll
  for (int i = 0; i < P::RING; ++i) {
    if (!P::has(turn, i, part)) continue;
#pragma unroll
    for (int c = 0; c < COLS; ++c) {
      const uint4 b = to[(i * P::PARTS * COLS + c) * 32];
      float total[4] = {};
      mma(total, ones, b.x, b.y);
      mma(total, ones, b.z, b.w);
      *(float2*)(totals + i * P::PARTS * ROWS + 8 * c) = float2{total[0], total[1]};
    }
  }
}

// Weights of a block's first turns of a step, by one thread.
template <class P>
__device__ __forceinline__ void fetch_first(const uint4* weights, int first, int turns = FETCHED) {
  const int own = (block_id() + BLOCKS - first) % BLOCKS;
  for (int job = own; job < P::JOBS && turns > 0; job += BLOCKS, turns -= P::AT_ONCE) {
    const int steps = smaller(smaller(turns, P::AT_ONCE) * P::TURN, P::STEPS);
    for (int tile = job * P::GROUPS; tile < (job + 1) * P::GROUPS; ++tile) {
      fetch(weights + (long long)tile * P::STEPS * UNITS, steps * UNITS);
    }
  }
}

template <class P, class X, class Wait, class End, class Next>
__device__ __forceinline__ void stream(
    const uint4* weights, int first, u32* done, int rows, const X& x, Wait wait, End end, Next next) {
  const int own = (block_id() + BLOCKS - first) % BLOCKS;
  if (own >= P::JOBS) {
    if (thread_id() == 0) next();
    return;
  }
  const int mine = (P::JOBS - own + BLOCKS - 1) / BLOCKS, part = warp_id() % P::PARTS;
  const int group = P::GROUPS == 1 ? 0 : warp_id() / P::PARTS;
  const int task = warp_id() / P::ENDS, which = warp_id() % P::ENDS;  // what this warp ends of a batch
  const uint4* begins = weights + ((long long)(own * P::GROUPS + group) * P::STEPS + part) * UNITS;
  float4* all = (float4*)shared_memory();
  char* behind_sums = shared_memory() + P::SUMS;
  float *totals = (float*)(behind_sums + 2 * ROWS * P::WIDTH), *by = totals + ROWS * P::WIDTH / 32;
  uint4* own_x = (uint4*)behind_sums + part * 32 * COLS + lane_id();
  float* own_totals = totals + part * ROWS + 2 * (lane_id() & 3);
  Cursor<P> ahead{begins, begins, mine, 0, 0, 0};
  Piece ring[P::RING];
#pragma unroll
  for (int i = 0; i < P::RING; ++i) {
    if (P::has(0, i, part)) ring[i] = load_piece(ahead.at + i * P::PARTS * UNITS);
  }
  ahead.go_on();
  Cursor<P> far = ahead;
  for (int i = 1; i < FETCHED && far.at; ++i) far.go_on();
  for (int begin = 0; begin < mine; begin += P::BATCH) {
    const int behind = smaller(begin + P::BATCH, mine);
    const bool ends = begin + task < behind;
    const int job_to_end = own + (begin + task) * BLOCKS;
    wait(job_to_end, ends ? which : P::ENDS, begin == 0);
    for (int from = 0; from < P::TURNS; from += P::AT_ONCE) {
      // Others may still read sums of the batch before, or x of other columns.
      if (begin || from) sync_block();
      const bool staged = begin == 0 || P::AT_ONCE < P::TURNS, last = from + P::AT_ONCE >= P::TURNS;
      const int end_of_part = smaller(from + P::AT_ONCE, P::TURNS);
      if (staged) ask_for_x<P>(x.x, rows, from, part, group, own_x);
      if (X::NORMED && begin == 0 && from == 0) {
        for (int row = warp_id(); row < ROWS; row += WARPS) {
          const float own = row < rows ? shrunk_by_warp(x.squares, row) : 0.0f;
          if (lane_id() == 0) by[row] = own;
        }
        if (HALF) sync_block();
      }
      for (int job = begin; job < behind; ++job) {
        float4* kept = all + ((job - begin) * WARPS + warp_id()) * COLS * 32 + lane_id();
        float sums[COLS][4];
#pragma unroll
        for (int c = 0; c < COLS; ++c) {
          const float4 before = from ? kept[32 * c] : float4{0.0f, 0.0f, 0.0f, 0.0f};
          sums[c][0] = before.x, sums[c][1] = before.y, sums[c][2] = before.z, sums[c][3] = before.w;
        }
#pragma unroll 1
        for (int turn = from; turn < end_of_part; ++turn) {
          const int first_place = (turn - from) * P::TURN;
          if (part == 0 && far.at) {
            if (lane_id() == 0) fetch(far.at, (P::FULL ? P::TURN : smaller(P::TURN, P::STEPS - far.turn * P::TURN)) * UNITS);
            far.go_on();
          }
          if (staged && job == begin) {
            take_x<P>(
                x, turn, end_of_part - 1 - turn, part, group, own_x + first_place * 32 * COLS, own_totals + first_place * ROWS, by);
          }
#pragma unroll
          for (int i = 0; i < P::RING; ++i) {
            const int place = first_place + i * P::PARTS;
            if (P::has(turn, i, part)) multiply_bytes(sums, ring[i], own_x + place * 32 * COLS, own_totals + place * ROWS);
            if (ahead.at && P::has(ahead.turn, i, part)) ring[i] = load_piece(ahead.at + i * P::PARTS * UNITS);
          }
          if (ahead.at) ahead.go_on();
        }
        if (X::NORMED && !HALF && last) {
          // All warps have found what rows are multiplied by.
          if (job == 0) sync_block();
#pragma unroll
          for (int c = 0; c < COLS; ++c) {
            const float2 both = *(const float2*)(by + 8 * c + 2 * (lane_id() & 3));
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[c][i] *= i & 1 ? both.y : both.x;
          }
        }
#pragma unroll
        for (int c = 0; c < COLS; ++c) kept[32 * c] = float4{sums[c][0], sums[c][1], sums[c][2], sums[c][3]};
      }
    }
    if (behind == mine && thread_id() == 0) next();
    sync_block();
    if (ends) end(job_to_end, which, all + task * WARPS * COLS * 32);
  }
  if (done) arrive(done);
}

struct Nothing {
  __device__ __forceinline__ void operator()() const {}
};

// A step: its jobs on blocks from `first` on. `wait(job, which, is_first)` is called before what others computed is read, and says
// which job a warp will end, and which of its ENDS parts (ENDS: none); `end(job, which, sums)` by each of these warps. `next` is
// called by one thread when the block has asked for all of its weights.
template <class P, class X, class Wait, class End, class Next = Nothing>
__device__ __forceinline__ void product(
    const uint4* weights, int first, u32* done, int rows, X x, Wait wait, End end, Next next = Next()) {
  if constexpr (BITS == 8) {
    stream<P>(weights, first, done, rows, x, wait, end, next);
  } else {
    const int own = (block_id() + BLOCKS - first) % BLOCKS;
    if (own >= P::JOBS) return;
    for (int job = own; job < P::JOBS; job += BLOCKS) {
      float sums[COLS][4];
      const uint4* tile = weights + (long long)(job * P::GROUPS + warp_id() / P::PARTS) * P::STEPS * UNITS;
      multiply<P::STEPS, P::PARTS>(sums, tile, rows, x, [&] { wait(job, warp_id(), job == own); });
      if (job != own) sync_block();
      keep_sums(sums);
      if (warp_id() < P::ENDS) end(job, warp_id(), (const float4*)shared_memory());
    }
    if (done) arrive(done);
  }
}

// ---- rows of x ------------------------------------------------------------------------------------------------------------

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

// Rows in 16 bits, shared in the order of a block's memory; where they are to be normed, with their squares. A number of 16 bits is
// as near before it is multiplied by its row's number as behind. So bfloat16 states are shared as their products with the norm's
// weight, and sums of products are multiplied by the row's number. Float16 has not the range: its states are shared as they are,
// which is how MLX has them, and normed in a block's memory.
template <bool NORMED_>
struct Shared {
  static constexpr bool NORMED = NORMED_;
  const u16* x;
  const float *squares, *weight;
};

// Hidden states, normed by the whole block together and kept in its memory.
struct Staged {
  using Raw = uint2;
  const u16* x;
  __device__ __forceinline__ void ready() {}
  __device__ __forceinline__ Raw load(int row, int column) const { return *(const uint2*)(x + row * HIDDEN + column); }
  __device__ __forceinline__ uint2 pairs(const Raw& raw, int) const { return raw; }
};

__device__ __forceinline__ void stage_all(u16* to, float* by, const Scratch& s, const float* weight) {
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

// A hidden state for the next product. weight: of its norm.
__device__ __forceinline__ void share_state(Scratch& s, int row, int column, float x, float weight) {
  s.near[place_of_x(row, column)] = narrow(HALF ? x : x * weight);
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
      if constexpr (BITS == 8) share_state(s, row, column, x, job.vectors[column]);
      float square = x * x;
#pragma unroll
      for (int distance = 1; distance < 16; distance *= 2) square += across(square, distance);
      if ((at & 15) == 0) s.squares[square_at(tile, row)] = square;
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

// A row's queries of a head, or its keys of one of those behind them, where they are normed before they are turned.
__device__ __forceinline__ void norm_row(const Job& job, int layer, const float* vectors, int row, int head) {
  Scratch& s = *job.scratch;
  const bool asks = head < HEADS;
  norm_head(
      job, s.raw + (row * (HEADS + KV_HEADS) + head) * D,
      vectors + (asks ? QUERY_NORM : KEY_NORM), job.origin + job.held + row, asks ? SCALE : 1.0f,
      asks ? s.queries + row * QUERY + head * D : cached(job, layer, 0, head - HEADS, job.held + row));
}

// The same of all rows and heads, by all blocks together.
__device__ __forceinline__ void norm_heads(const Job& job, int layer, const float* vectors) {
  constexpr int BOTH = HEADS + KV_HEADS;
  for (int at = block_id() * WARPS + warp_id(); at < job.rows * BOTH; at += BLOCKS * WARPS) {
    norm_row(job, layer, vectors, at / BOTH, at % BOTH);
  }
}

// Hidden states of 16 columns, always a block's own, and what of the next norm belongs to them: nobody needs to be waited for.
struct Old {
  float state[4], weight[2];
};
__device__ __forceinline__ void look(Old& old, const Scratch& s, const float* norm, int tile, int c) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = 8 * c + 2 * (lane_id() & 3) + (i & 1), column = 16 * tile + (lane_id() >> 2) + 8 * (i >> 1);
    old.state[i] = load_float(s.state + row * HIDDEN + column);
    if constexpr (BITS == 8) old.weight[i >> 1] = norm[column];
  }
}

// New hidden states, and their squares.
__device__ __forceinline__ void end_state(
    const Job& job, int layer, int tile, int c, const Old& old, const float (&sums)[4]) {
  Scratch& s = *job.scratch;
  const int r = lane_id() >> 2, quarter = lane_id() & 3;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int row = 8 * c + 2 * quarter + n;
    float* to = s.state + row * HIDDEN + 16 * tile + r;
    const float low = old.state[n] + sums[n], high = old.state[n + 2] + sums[n + 2];
    to[0] = low, to[8] = high;
    if constexpr (BITS == 8) {
      share_state(s, row, 16 * tile + r, low, old.weight[0]);
      share_state(s, row, 16 * tile + r + 8, high, old.weight[1]);
    }
    float square = low * low + high * high;
    square += across(square, 4);
    square += across(square, 8);
    square += across(square, 16);
    if (r == 0) s.squares[square_at(tile, row)] = square;
    if (layer >= 0 && row < job.rows) {
      put_tap(job, layer, row, 16 * tile + r, low);
      put_tap(job, layer, row, 16 * tile + r + 8, high);
    }
  }
}

__device__ __forceinline__ void end_mlp(const Job& job, int tile, int c, const float4* all) {
  float gate[4], up[4];
  all_sums<WARPS / 2>(gate, 0, c, all);
  all_sums<WARPS / 2>(up, 1, c, all);
  const int r = lane_id() >> 2, quarter = lane_id() & 3;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = 8 * c + 2 * quarter + (i & 1), column = 16 * tile + r + 8 * (i >> 1);
    const float value = gate[i] / (1.0f + power2(-1.4426950408889634f * gate[i])) * up[i];
    job.scratch->active[BITS == 8 ? place_of_x(row, column) : row * MLP + column] = narrow(value);
  }
}

// Keys that a block's warps take at once, 16 each. A head's keys are dealt out to SPLITS blocks by as many; where there are few,
// fewer blocks have any.
constexpr int DEALT = 16 * WARPS;
__device__ __forceinline__ int splits_of(const Job& job) { return smaller((job.held + job.rows + DEALT - 1) / DEALT, SPLITS); }

// What the blocks of a head have left, put together and narrowed by the last of them to be done.
__device__ __forceinline__ void end_head(const Job& job, int head, int splits) {
  Scratch& s = *job.scratch;
  int* last = (int*)shared_memory();
  sync_block();
  if (thread_id() == 0) last[0] = splits == 1 || leave(s.heads + head) == (u32)splits - 1;
  sync_block();
  if (!last[0]) return;
  if (thread_id() == 0) s.heads[head] = 0;
  const Attended attended{s, splits};
  for (int at = thread_id(); at < job.rows * (D / 4); at += THREADS) {
    const int row = at / (D / 4), column = head * D + at % (D / 4) * 4;
    *(uint2*)(s.attended + place_of_x(row, column)) = two_pairs(attended.load(row, column));
  }
}

// A block's keys of one head.
__device__ __forceinline__ void attend(const Job& job, int layer, const float* vectors, int own, int splits) {
  Scratch& s = *job.scratch;
  const int head = own % HEADS, split = own / HEADS, lane = lane_id(), r = lane >> 2, quarter = lane & 3;
  const int seen = job.held + job.rows, group = head / (HEADS / KV_HEADS);
  if constexpr (NORMED_WHERE_USED) {
    // Blocks that share keys write the same numbers.
    for (int at = warp_id(); at < 2 * job.rows; at += WARPS) {
      norm_row(job, layer, vectors, at >> 1, at & 1 ? HEADS + group : head);
    }
    sync_block();
  }
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
  if constexpr (BITS == 8) end_head(job, head, splits);
}

using QkvPlan = Plan<OF_HIDDEN, 1, QKV_TILES, COLS>;
using OutPlan = Plan<OF_QUERY, 1, HIDDEN_TILES, COLS>;
using MlpPlan = Plan<OF_HIDDEN, 2, MLP_TILES, COLS>;
using DownPlan = Plan<OF_MLP, 1, HIDDEN_TILES, COLS>;
using HeadPlan = Plan<OF_HIDDEN, HEAD_GROUPS, VOCAB_TILES / HEAD_GROUPS, HEAD_GROUPS * COLS>;

__device__ __forceinline__ void layer(const Job& job, int number, u32*& counter, int& before) {
  Scratch& s = *job.scratch;
  const uint4* weights = job.weights + (long long)number * LAYER * UNITS;
  const float* vectors = job.vectors + number * LAYER_VECTORS;
  const auto wait = [&] { await(counter, before); };
  const auto wait_once = [&](int, int, bool first) {
    if (first) wait();
  };
  const auto done = [&](int jobs) { counter += APART, before = smaller(jobs, BLOCKS); };

  // Queries, keys and values on the first blocks, attention behind them, the two matrices that end in hidden states at the end.
  constexpr int BEHIND = QKV_TILES % BLOCKS;
  Old old;
  const float* norm = vectors + NORM_OF_MLP;  // the next one
  const auto wait_and_look = [&](int tile, int c, bool first) {
    if (c < COLS) look(old, s, norm, tile, c);
    if (first) wait();
  };
  const auto normed = [&](const float* weight) {
    if constexpr (BITS == 8) return Shared<true>{s.near, s.squares, weight};
    else return Normed{s.state, s.squares, weight};
  };
  product<QkvPlan>(
      weights + QKV_AT * UNITS, 0, counter + APART, job.rows, normed(vectors), wait_once,
      [&](int tile, int c, const float4* all) {
        float sums[4];
        all_sums<WARPS>(sums, 0, c, all);
        end_qkv(job, number, tile, c, sums);
      },
      // Attention needs no weights, so a batch of this block's can come meanwhile.
      [&] { fetch_first<OutPlan>(weights + O_AT * UNITS, ENDING, OutPlan::BATCH * OutPlan::TURNS); });
  done(QKV_TILES);
  if constexpr (QK_NORM && !NORMED_WHERE_USED) {
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
      attend(job, number, vectors, i, splits);
    }
    arrive(counter + APART);
  }
  done(attending);
  const auto attended = [&] {
    if constexpr (BITS == 8) return Shared<false>{s.attended};
    else return Attended{s, splits};
  }();
  product<OutPlan>(
      weights + O_AT * UNITS, ENDING, counter + APART, job.rows, attended, wait_and_look,
      [&](int tile, int c, const float4* all) {
        float sums[4];
        all_sums<WARPS>(sums, 0, c, all);
        end_state(job, -1, tile, c, old, sums);
      },
      [&] { fetch_first<MlpPlan>(weights + (long long)MLP_AT * UNITS, 0); });
  done(HIDDEN_TILES);
  product<MlpPlan>(
      weights + (long long)MLP_AT * UNITS, 0, counter + APART, job.rows, normed(norm), wait_once,
      [&](int tile, int c, const float4* all) { end_mlp(job, tile, c, all); },
      [&] { fetch_first<DownPlan>(weights + (long long)DOWN_AT * UNITS, ENDING); });
  done(MLP_TILES);
  norm = vectors + LAYER_VECTORS;
  const auto active = [&] {
    if constexpr (BITS == 8) return Shared<false>{s.active};
    else return Active{s.active};
  }();
  product<DownPlan>(
      weights + (long long)DOWN_AT * UNITS, ENDING, counter + APART, job.rows, active, wait_and_look,
      [&](int tile, int c, const float4* all) {
        float sums[4];
        all_sums<WARPS>(sums, 0, c, all);
        end_state(job, number, tile, c, old, sums);
      },
      [&] {
        const uint4* behind = weights + (long long)LAYER * UNITS;
        if (number + 1 < LAYERS) fetch_first<QkvPlan>(behind, 0);
        else fetch_first<HeadPlan>(behind, 0);
      });
  done(HIDDEN_TILES);
}

// Products of the last states, normed, with all rows of the head's matrix: `end(row, column, value, n)` is given each; of
// all that a lane is given with the same n % 2, the row is the same.
template <class End>
__device__ __forceinline__ void last_products(
    const Job& job, const uint4* table, u32* counter, int before, u32* done, End end) {
  Scratch& s = *job.scratch;
  u16* staged = (u16*)(shared_memory() + WARPS * COLS * 512);
  const float* norm = job.vectors + LAST_NORM;
  const auto x = [&] {
    if constexpr (BITS == 8) return Shared<true>{s.near, s.squares, norm};
    else return Staged{staged};
  }();
  product<HeadPlan>(
      table, 0, done, job.rows, x,
      [&](int, int, bool first) {
        if (!first) return;
        await(counter, before);
        if constexpr (BITS == 16) stage_all(staged, (float*)(staged + ROWS * HIDDEN), s, norm);
      },
      [&](int at, int which, const float4* all) {
        const int group = which / COLS, c = which % COLS, tile = at * HEAD_GROUPS + group;
        float sums[4];
        all_sums<WARPS / HEAD_GROUPS>(sums, group, c, all);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const int row = 8 * c + 2 * (lane_id() & 3) + (n & 1), column = 16 * tile + (lane_id() >> 2) + 8 * (n >> 1);
          if (row < job.rows && column < VOCAB) end(row, column, sums[n], n);
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
