// Runs the threads of one GPU thread group as fibers on one CPU thread, and lets groups of them meet.
// A lane runs until it waits for the others, so an access that only a missing barrier protects is seen.
#pragma once
#include <ucontext.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

namespace fibers {

struct Meeting {
  int size = 0, arrived = 0;
  unsigned long generation = 0;
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool done = false;
};

inline std::vector<Fiber> all;
inline ucontext_t home;
inline int current = -1;
inline Meeting block;
inline std::vector<Meeting> warps;
inline std::function<void()> work;

inline void pause() {
  Fiber& me = all[current];
  swapcontext(&me.context, &home);
}

inline void meet(Meeting& where) {
  const unsigned long generation = where.generation;
  if (++where.arrived == where.size) {
    where.arrived = 0;
    ++where.generation;
    return;
  }
  while (where.generation == generation) pause();
}

inline void enter() {
  work();
  all[current].done = true;
  while (true) pause();
}

// Runs `body` once in each of `threads` threads. Returns false where they wait for one another for ever.
inline bool run(int threads, std::function<void()> body) {
  work = body;
  all.clear();
  all.resize(threads);
  block = Meeting{threads};
  warps.assign((threads + 31) / 32, Meeting{32});
  for (auto& fiber : all) {
    constexpr int bytes = 1 << 16;
    fiber.stack.reset(new char[bytes]);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = bytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter, 0);
  }
  for (bool left = true; left;) {
    left = false;
    const auto before = block.generation;
    unsigned long moved = 0;
    for (auto& warp : warps) moved -= warp.generation;
    int finished = 0;
    for (current = 0; current < threads; ++current) {
      if (all[current].done) continue;
      swapcontext(&home, &all[current].context);
      finished += all[current].done;
      left |= !all[current].done;
    }
    for (auto& warp : warps) moved += warp.generation;
    if (left && moved == 0 && before == block.generation && finished == 0) return false;
  }
  return true;
}

}  // namespace fibers
