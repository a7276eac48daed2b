// A DSpark drafter's round in one launch, behind stack.cu: the taps of committed tokens become keys and values of every layer, and
// where drafts are asked for the block runs behind them, and a Markov chain walks over its slots.
//
// Each block of the launch keeps its share of the chain's second table in its memory; at every slot all find their best token and
// agree on the best of all.
//
// Set in front of this text besides: TAPS (columns of a row of taps), TAPS_HALF (1: float16, 0: bfloat16), RANK (of the Markov
// tables), ARRAYS (arrays of taps), MASK (the token of the slots behind the anchor), FIRST (the first slot that predicts), SLOTS (of a
// block), EXTRA 5 + SLOTS.

namespace dspark_stack {

#ifndef DSPARK_SHIM
__device__ __forceinline__ float widen_bfloat(u16 value) { return __uint_as_float((u32)value << 16); }
__device__ __forceinline__ float widen_half(u16 value) {
  float out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(value));
  return out;
}
#endif

constexpr int TAPS_STEPS = TAPS / COLUMNS, CONTEXT_TILES = LAYERS * 2 * KEYS / 16;
constexpr int SHARE = (VOCAB + BLOCKS - 1) / BLOCKS;  // rows of the second Markov table a block has
constexpr int PITCH = RANK + 8;                       // of these rows in a block's memory: spreads them over the banks

// Behind the layers' own scratch.
struct Extra {
  alignas(16) float context[ROWS * HIDDEN];
  alignas(16) float squares[HIDDEN_TILES * ROWS];
  alignas(16) float keys[ROWS * LAYERS * KEYS];  // not normed yet
  alignas(16) float logits[SLOTS * VOCAB];
};

// taken: rows of taps; they stand behind the `before` tokens that the caches hold. The first `apart` rows are an array each, all
// further ones share the next array. after: by token of the target, what follows it; by_row: the same by row of the drafter's
// vocabulary; names: the token of each row.
struct Round {
  const uint4* weights;
  const u16 *embedding, *after, *by_row, *second;
  const u16* taps[ARRAYS];
  const int* names;
  Extra* extra;
  int* tokens;
  int anchor, taken, apart, before, drafts;
};

__device__ __forceinline__ float widen_tap(u16 value) { return TAPS_HALF ? widen_half(value) : widen_bfloat(value); }

struct Tapped {
  using Raw = uint2;
  const Round& round;
  int first;
  __device__ __forceinline__ void ready() {}
  __device__ __forceinline__ Raw load(int row, int column) const {
    const int at = first + row;
    const u16* from = round.taps[0];
#pragma unroll
    for (int i = 1; i < ARRAYS; ++i) {
      if (i <= at && i <= round.apart) from = round.taps[i];
    }
    if (at > round.apart) from += (long long)(at - round.apart) * TAPS;
    return *(const uint2*)(from + column);
  }
  __device__ __forceinline__ uint2 pairs(const Raw& raw, int) const {
    return two_pairs(
        {widen_tap((u16)raw.x), widen_tap((u16)(raw.x >> 16)), widen_tap((u16)raw.y), widen_tap((u16)(raw.y >> 16))});
  }
};

// Context rows of 16 columns, and their squares.
__device__ __forceinline__ void end_context(Extra& extra, int tile, int c, const float4* all) {
  float sums[4];
  all_sums<WARPS>(sums, 0, c, all);
  const int r = lane_id() >> 2, quarter = lane_id() & 3;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int row = 8 * c + 2 * quarter + n;
    float* to = extra.context + row * HIDDEN + 16 * tile + r;
    to[0] = sums[n], to[8] = sums[n + 2];
    float square = sums[n] * sums[n] + sums[n + 2] * sums[n + 2];
    square += across(square, 4);
    square += across(square, 8);
    square += across(square, 16);
    if (r == 0) extra.squares[tile * ROWS + row] = square;
  }
}

// Keys (not normed, in pairs as in `end_qkv`) and values of context rows.
__device__ __forceinline__ void end_context_layer(
    const Job& job, const Round& round, int before, int rows, int tile, int c, const float4* all) {
  constexpr int EACH = 2 * KEYS / 16;
  float sums[4];
  all_sums<WARPS>(sums, 0, c, all);
  const int r = lane_id() >> 2, quarter = lane_id() & 3, number = tile / EACH, own = tile % EACH;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int row = 8 * c + 2 * quarter + n;
    if (row >= rows) continue;
    if (own < EACH / 2) {
      float* to = round.extra->keys + (row * LAYERS + number) * KEYS + own / (D / 16) * D + own % (D / 16) * 8 + r;
      to[0] = sums[n], to[D / 2] = sums[n + 2];
    } else {
      const int at = 16 * (own - EACH / 2) + r;
      u16* to = cached(job, number, 1, at / D, before + row) + at % D;
      to[0] = narrow(sums[n]), to[8] = narrow(sums[n + 2]);
    }
  }
}

__device__ __forceinline__ void norm_context(const Job& job, const Round& round, int before, int rows) {
  for (int at = block_id() * WARPS + warp_id(); at < rows * LAYERS * KV_HEADS; at += BLOCKS * WARPS) {
    const int row = at / (LAYERS * KV_HEADS), number = at / KV_HEADS % LAYERS, head = at % KV_HEADS;
    norm_head(
        job, round.extra->keys + (row * LAYERS + number) * KEYS + head * D,
        job.vectors + number * LAYER_VECTORS + KEY_NORM, job.origin + before + row, 1.0f,
        cached(job, number, 0, head, before + row));
  }
}

// One token a slot: the best of its logits and what the token before it says.
__device__ __forceinline__ void walk(const Job& job, const Round& round, u32* counter, int before) {
  if (block_id() == 0 && thread_id() == 0) round.tokens[0] = round.anchor;
  u16* own = (u16*)shared_memory();
  const int first = block_id() * SHARE;
  for (int at = thread_id(); at < SHARE * (RANK / 8); at += THREADS) {
    const int row = at / (RANK / 8), column = at % (RANK / 8) * 8;
    if (first + row < VOCAB) {
      *(uint4*)(own + row * PITCH + column) = *(const uint4*)(round.second + (long long)(first + row) * RANK + column);
    }
  }
  await(counter, before);
  int previous = 0;
  for (int slot = 0; slot < round.drafts; ++slot) {
    const u16* from = slot ? round.by_row + (long long)previous * RANK : round.after + (long long)round.anchor * RANK;
    u64 best = 0;
    for (int at = thread_id(); at < SHARE; at += THREADS) {
      if (first + at >= VOCAB) break;
      float sum = load_float(round.extra->logits + (long long)(FIRST + slot) * VOCAB + first + at);
#pragma unroll
      for (int column = 0; column < RANK; column += 8) {
        const uint4 a = *(const uint4*)(from + column), b = *(const uint4*)(own + at * PITCH + column);
        const u32 left[4] = {a.x, a.y, a.z, a.w}, right[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sum += widen((u16)left[i]) * widen((u16)right[i]);
          sum += widen((u16)(left[i] >> 16)) * widen((u16)(right[i] >> 16));
        }
      }
      best = better(best, key_of(sum, first + at));
    }
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) best = better(best, across_key(best, distance));
    if (lane_id() == 0 && best) put_larger(job.scratch->best + slot, best);
    counter += APART;
    arrive(counter);
    await(counter, BLOCKS);
    previous = place_of(load_key(job.scratch->best + slot));
    if (block_id() == 0 && thread_id() == 0) round.tokens[slot + 1] = round.names[previous];
  }
}

// Keys and values of the taps, as many rows at once as products have. Counters are used again: each time all have to come once more.
__device__ __forceinline__ void take_in(const Job& job, const Round& round, u32* counter) {
  Extra& extra = *round.extra;
  for (int first = 0, time = 1; first < round.taken; first += ROWS, ++time) {
    const int rows = smaller(round.taken - first, ROWS), before = round.before + first;
    product<Plan<TAPS_STEPS, 1, HIDDEN_TILES, COLS>>(
        round.weights, ENDING, counter, rows, Tapped{round, first},
        [&](int, int, bool is_first) {
          if (is_first && first) await(counter + 2 * APART, (time - 1) * BLOCKS);
        },
        [&](int tile, int c, const float4* all) { end_context(extra, tile, c, all); });
    product<Plan<OF_HIDDEN, 1, CONTEXT_TILES, COLS>>(
        round.weights + (long long)HIDDEN_TILES * TAPS_STEPS * UNITS, 0, counter + APART, rows,
        Normed{extra.context, extra.squares, job.vectors + FREQUENCIES + D / 2},
        [&](int, int, bool is_first) {
          if (is_first) await(counter, time * smaller(HIDDEN_TILES, BLOCKS));
        },
        [&](int tile, int c, const float4* all) { end_context_layer(job, round, before, rows, tile, c, all); });
    await(counter + APART, time * smaller(CONTEXT_TILES, BLOCKS));
    norm_context(job, round, before, rows);
    arrive(counter + 2 * APART);
  }
}

__device__ __forceinline__ void run(const Job& job, const Round& round) {
  Extra& extra = *round.extra;
  u32* counter = job.scratch->counters + 3 * APART;
  // All blocks take part in what follows of the taps, behind which the layers wait.
  begin(
      job,
      [&](int row, int column) {
        return widen(round.embedding[(long long)(row ? MASK : round.anchor) * HIDDEN + column]);
      },
      counter);
  take_in(job, round, job.scratch->counters);
  if (round.taken) await(job.scratch->counters + 2 * APART, (round.taken + ROWS - 1) / ROWS * BLOCKS);
  int before = smaller(HIDDEN_TILES, BLOCKS);
  if (!round.drafts) {
    leave_all(*job.scratch, [] {});
    return;
  }
#pragma unroll 1
  for (int number = 0; number < LAYERS; ++number) layer(job, number, counter, before);
  last_products(
      job, job.weights + (long long)LAYERS * LAYER * UNITS, counter, before, counter + APART,
      [&](int row, int column, float value, int) { extra.logits[(long long)row * VOCAB + column] = value; });
  counter += APART, before = smaller(VOCAB_TILES / HEAD_GROUPS, BLOCKS);
  walk(job, round, counter, before);
  leave_all(*job.scratch, [] {});
}

}  // namespace dspark_stack
