// What the lanes of a warp do together, for a CPU. A lane that does not take part leaves the others waiting for ever.
#pragma once
#include "fibers.hpp"

namespace warps {

struct Operands {
  uint32_t a[32][4], b[32][2];
};
inline std::vector<Operands> operands;
inline std::vector<std::vector<float>> lanes;
inline int block_number;

inline int lane() { return fibers::current & 31; }
inline int warp() { return fibers::current >> 5; }
inline void meet() { fibers::meet(fibers::warps[warp()]); }

// Another lane's value: the one whose number differs by `distance` in its bits.
inline float across(float value, int distance) {
  lanes[warp()][lane()] = value;
  meet();
  const float other = lanes[warp()][lane() ^ distance];
  meet();
  return other;
}

inline unsigned long long across_bits(unsigned long long value, int distance) {
  uint32_t(&both)[2] = operands[warp()].b[lane()];
  both[0] = (uint32_t)value, both[1] = value >> 32;
  meet();
  const uint32_t(&other)[2] = operands[warp()].b[lane() ^ distance];
  value = other[0] | (unsigned long long)other[1] << 32;
  meet();
  return value;
}

// 8 x 8 numbers of 16 bits, a row in 4 lanes, columns and rows exchanged.
inline uint32_t turned(uint32_t value) {
  Operands& all = operands[warp()];
  all.b[lane()][0] = value;
  meet();
  const auto at = [&](int row, int column) {
    return (all.b[row * 4 + column / 2][0] >> (16 * (column & 1))) & 0xFFFF;
  };
  const int row = lane() >> 2, column = 2 * (lane() & 3);
  const uint32_t out = at(column, row) | (at(column + 1, row) << 16);
  meet();
  return out;
}

// d += a * b of 16-bit numbers; the fragments' layout is the one in the PTX manual for m16n8k16.
template <float (*WIDEN)(uint16_t)>
void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  Operands& all = operands[warp()];
  const int row = lane() >> 2, quarter = lane() & 3;
  std::memcpy(all.a[lane()], a, sizeof(a));
  all.b[lane()][0] = b0, all.b[lane()][1] = b1;
  meet();
  const auto half_of = [](uint32_t pair, int which) { return WIDEN(uint16_t(pair >> (16 * which))); };
  for (int i = 0; i < 4; ++i) {
    const int m = row + 8 * (i >> 1), n = 2 * quarter + (i & 1);
    float sum = 0;
    for (int k = 0; k < 16; ++k) {
      const int from = (k & 7) >> 1, late = k >> 3;
      const float left = half_of(all.a[(m & 7) * 4 + from][(m >> 3) + 2 * late], k & 1);
      sum += left * half_of(all.b[n * 4 + from][late], k & 1);
    }
    d[i] += sum;
  }
  meet();
}

// Runs one block after the other; `before` each of them. Returns false where threads wait for one another for ever.
inline bool launch(int blocks, int threads, std::function<void()> body, std::function<void()> before = [] {}) {
  bool ended = true;
  operands.resize(threads / 32);
  lanes.assign(threads / 32, std::vector<float>(32));
  for (block_number = 0; block_number < blocks; ++block_number) {
    before();
    ended &= fibers::run(threads, body);
  }
  return ended;
}

// Runs all blocks beside one another.
inline bool launch_together(int blocks, int threads, std::function<void()> body) {
  operands.resize(blocks * threads / 32);
  lanes.assign(blocks * threads / 32, std::vector<float>(32));
  return fibers::run(blocks * threads, body, blocks);
}

}  // namespace warps
