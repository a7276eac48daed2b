// A target's forward in one launch, behind stack.cu: logits and taps of up to 8 * COLS rows of tokens, and what greedy decoding says
// of them: each row's likeliest token, how many of the tokens behind the first stand, and the token behind those.
//
// Set in front of this text besides: TIED (the head is the embedding), EXTRA 1.

namespace dspark_stack {

// choice: a token for each row; report: how many stand, the next token, then all tokens but the first; words: the same for the host, two
// numbers each.
struct Said {
  u16* logits;
  int *choice, *accepted, *following, *report;
  int* words[4 * COLS + 1];
};

__device__ __forceinline__ void say(const Job& job, const int* ids, const Said& said) {
  const auto tell = [&](int at, int number) { said.report[at] = said.words[at / 2][at % 2] = number; };
  int standing = 0;
  for (int row = 0; row < job.rows; ++row) {
    const int best = place_of(load_key(job.scratch->best + row));
    said.choice[row] = best;
    if (standing == row && row + 1 < job.rows && ids[row + 1] == best) ++standing;
    if (row) tell(row + 1, ids[row]);
  }
  said.accepted[0] = standing;
  said.following[0] = said.choice[standing];
  tell(0, standing);
  tell(1, said.following[0]);
}

__device__ __forceinline__ void run(const Job& job, const int* ids, const Said& said) {
  const uint4* last = job.weights + (long long)LAYERS * LAYER * UNITS;
  const uint4* embedding = TIED ? last : last + (long long)VOCAB_TILES * OF_HIDDEN * UNITS;
  u32* counter = job.scratch->counters;
  int before = smaller(HIDDEN_TILES, BLOCKS);
  begin(
      job, [&](int row, int column) { return number(embedding, ids[row], column, OF_HIDDEN); }, counter);
#pragma unroll 1
  for (int number = 0; number < LAYERS; ++number) layer(job, number, counter, before);
  u64 best[2] = {0, 0};
  last_products(job, last, counter, before, nullptr, [&](int row, int column, float value, int n) {
    const u16 logit = narrow(value);
    said.logits[(long long)row * VOCAB + column] = logit;
    best[n & 1] = better(best[n & 1], key_of(widen(logit), column));
  });
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    for (int distance = 4; distance < 32; distance *= 2) best[n] = better(best[n], across_key(best[n], distance));
    const int row = 8 * (warp_id() % COLS) + 2 * lane_id() + n;
    if (lane_id() < 4 && best[n]) put_larger(job.scratch->best + row, best[n]);
  }
  leave_all(*job.scratch, [&] { say(job, ids, said); });
}

}  // namespace dspark_stack
