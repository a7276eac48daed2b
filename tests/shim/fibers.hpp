// Runs the threads of one GPU thread group as fibers on one CPU thread, and lets groups of them meet.
// A lane runs until it waits for the others, so an access that only a missing barrier protects is seen.
#pragma once
#include <setjmp.h>
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
  jmp_buf here;
  std::unique_ptr<char[]> stack;
  bool started = false, done = false;
};

inline std::vector<Fiber> all;
inline jmp_buf at_home;
inline int current = -1;
inline Meeting block;
inline std::vector<Meeting> warps, blocks;
// Counts what else lets threads go on.
inline unsigned long noticed, ended;
inline std::function<void()> work;

// Only a fiber's first step goes by its context: going from one context to another asks the system each time.
inline void pause() {
  if (_setjmp(all[current].here) == 0) _longjmp(at_home, 1);
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

inline unsigned long moves() {
  unsigned long count = noticed + ended + block.generation;
  for (auto& warp : warps) count += warp.generation;
  for (auto& each : blocks) count += each.generation;
  return count;
}

inline void go_on(int thread) {
  if (all[thread].done) return;
  current = thread;
  if (_setjmp(at_home) == 0) {
    if (all[thread].started) _longjmp(all[thread].here, 1);
    all[thread].started = true;
    setcontext(&all[thread].context);
  }
  ended += all[thread].done;
}

inline void each_goes_on(int first, int last) {
  for (int i = first; i < last; ++i) go_on(i);
}

// Has parts of `size` threads go on, in turns the first and the last one ahead of the others, until none does. Returns whether all
// are done.
inline bool while_it_moves(int first, int last, int size, std::function<void(int)> part) {
  for (bool forth = true;; forth = !forth) {
    const unsigned long before = moves();
    for (int i = first; i < last; i += size) part(forth ? i : first + last - size - i);
    if (moves() == before) break;
  }
  bool done = true;
  for (int i = first; i < last; ++i) done &= all[i].done;
  return done;
}

// Runs `body` once in each of `threads` threads, of one block or of several: of these a warp goes on until it has to wait for others,
// and so does a block, so that it is far ahead where nothing holds it. Returns false where they wait for one another for ever.
inline bool run(int threads, std::function<void()> body, int together = 1) {
  work = body;
  all.clear();
  all.resize(threads);
  block = Meeting{threads};
  warps.assign((threads + 31) / 32, Meeting{32});
  blocks.assign(together, Meeting{threads / together});
  for (auto& fiber : all) {
    constexpr int bytes = 1 << 16;
    fiber.stack.reset(new char[bytes]);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = bytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter, 0);
  }
  if (together == 1) return while_it_moves(0, threads, threads, [&](int) { each_goes_on(0, threads); });
  const int size = threads / together;
  return while_it_moves(0, threads, size, [&](int first) {
    while_it_moves(first, first + size, 32, [](int lane) {
      while_it_moves(lane, lane + 32, 32, [](int at) { each_goes_on(at, at + 32); });
    });
  });
}

}  // namespace fibers
