// y[m, n] = sum_k x[m, k] * (scale[n, k / GROUP] * q[n, k] + bias[n, k / GROUP]) for 1 to 8 * COLS rows of x.
//
// The weights are the left 8 x 8 operand of the simdgroup's matrix product and the rows of x the right one, so that one pass
// over the weights serves every row. A simdgroup walks over its own groups of K, multiplies the bare integers in float32,
// and applies scale and bias to the sums: one multiplication for each group, not for each weight. The simdgroups of a
// threadgroup share the same weight rows and add up their sums at the end.
//
// Which k stands in which of the 8 places of a product is free as long as both operands agree. A lane holds places 2q and
// 2q + 1 of a weight row; it is given element s of the first and of the second half of quarter q of the group, so that both
// its weights and its part of x lie side by side in memory.
//
// Set in front of this text: BITS (4, 8), GROUP (32, 64), COLS (8 rows of x each: 1, 2), TILES (of 8 weight rows a
// threadgroup), SIMDS (simdgroups a threadgroup), HALF (1: float16, 0: bfloat16).

namespace dspark_qmm {

typedef uint u32;
typedef ushort u16;
typedef simdgroup_matrix<float, 8, 8> Square;

constant constexpr int STEPS = GROUP / 8;              // matrix products a group takes
constant constexpr int WORDS = GROUP * BITS / 32 / 4;  // 32-bit words of a group that one lane decodes

inline float widen(u16 value) {
#if HALF
  return float(as_type<half>(value));
#else
  return as_type<float>(u32(value) << 16);
#endif
}

inline u16 narrow(float value) {
#if HALF
  return as_type<u16>(half(value));
#else
  const u32 bits = as_type<u32>(value);
  return u16((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
#endif
}

// Where a lane's two elements of an 8 x 8 matrix are: row, and column of the first.
inline int row_of(int lane) { return ((lane >> 2) & 4) + ((lane >> 1) & 3); }
inline int column_of(int lane) { return ((lane >> 2) & 2) * 2 + (lane & 1) * 2; }

// Element `at` of a lane's packed weights.
inline float decode(const thread u32* words, int at) {
  return float((words[at * BITS / 32] >> (at * BITS % 32)) & ((1u << BITS) - 1));
}

inline void load_words(thread u32* words, const device u32* from) {
  if (WORDS == 4) {
    const uint4 all = *(const device uint4*)from;
    words[0] = all.x, words[1] = all.y, words[2] = all.z, words[3] = all.w;
  } else if (WORDS == 2) {
    const uint2 all = *(const device uint2*)from;
    words[0] = all.x, words[1] = all.y;
  } else {
    words[0] = *from;
  }
}

// STEPS neighbouring elements of x, zeros where `valid` is false.
inline void load_x(thread float* out, const device u16* from, bool valid) {
  u32 raw[STEPS / 2];
  for (int i = 0; i < STEPS / 2; i += 2) {
    const uint2 both = valid ? *(const device uint2*)(from + 2 * i) : uint2(0, 0);
    raw[i] = both.x, raw[i + 1] = both.y;
  }
  for (int i = 0; i < STEPS; ++i) out[i] = widen(u16(raw[i / 2] >> (16 * (i & 1))));
}

// One threadgroup: TILES * 8 weight rows from `first` on, all rows of x. y is [m, n].
inline void run(
    threadgroup float* shared, const device u32* w, const device u16* scales, const device u16* biases, device u16* y,
    const device u16* x, int first, int n, int m, int k, int simd, int lane) {
  const int row = row_of(lane), column = column_of(lane), groups = k / GROUP;
  // In a weight row the lane has quarter `column / 2`; of x it has place `row`: half `row % 2` of quarter `row / 2`.
  const int weight_at = column / 2 * WORDS, x_at = row / 2 * (GROUP / 4) + (row & 1) * (GROUP / 8);
  float sums[TILES][COLS][2] = {};

  for (int group = simd; group < groups; group += SIMDS) {
    Square right[COLS][STEPS];
    float x_sums[COLS][2];
    for (int c = 0; c < COLS; ++c) {
      float a[STEPS], b[STEPS];
      const int row0 = c * 8 + column;
      load_x(a, x + row0 * k + group * GROUP + x_at, row0 < m);
      load_x(b, x + (row0 + 1) * k + group * GROUP + x_at, row0 + 1 < m);
      Square ones, total;
      ones.thread_elements()[0] = ones.thread_elements()[1] = 1;
      total.thread_elements()[0] = total.thread_elements()[1] = 0;
      for (int s = 0; s < STEPS; ++s) {
        right[c][s].thread_elements()[0] = a[s];
        right[c][s].thread_elements()[1] = b[s];
        simdgroup_multiply_accumulate(total, ones, right[c][s], total);
      }
      x_sums[c][0] = total.thread_elements()[0], x_sums[c][1] = total.thread_elements()[1];
    }
    for (int t = 0; t < TILES; ++t) {
      const int at = first + t * 8 + row;
      u32 words[WORDS];
      load_words(words, w + (long(at) * groups + group) * (GROUP * BITS / 32) + weight_at);
      const float scale = widen(scales[long(at) * groups + group]), bias = widen(biases[long(at) * groups + group]);
      Square left, products[COLS];
      for (int c = 0; c < COLS; ++c) {
        products[c].thread_elements()[0] = products[c].thread_elements()[1] = 0;
      }
      for (int s = 0; s < STEPS; ++s) {
        left.thread_elements()[0] = decode(words, s);
        left.thread_elements()[1] = decode(words, s + STEPS);
        for (int c = 0; c < COLS; ++c) simdgroup_multiply_accumulate(products[c], left, right[c][s], products[c]);
      }
      for (int c = 0; c < COLS; ++c) {
        for (int i = 0; i < 2; ++i) {
          sums[t][c][i] += scale * products[c].thread_elements()[i] + bias * x_sums[c][i];
        }
      }
    }
  }

  for (int t = 0; t < TILES; ++t) {
    for (int c = 0; c < COLS; ++c) {
      for (int i = 0; i < 2; ++i) shared[(((simd * TILES + t) * COLS + c) * 2 + i) * 32 + lane] = sums[t][c][i];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  constexpr int parts = TILES * COLS * 2;
  for (int part = simd; part < parts; part += SIMDS) {
    float total = 0;
    for (int s = 0; s < SIMDS; ++s) total += shared[(s * parts + part) * 32 + lane];
    const int i = part & 1, c = part / 2 % COLS, t = part / 2 / COLS, at = c * 8 + column + i;
    if (at < m) y[at * n + first + t * 8 + row] = narrow(total);
  }
}

}  // namespace dspark_qmm
