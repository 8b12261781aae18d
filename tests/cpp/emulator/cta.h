// What runs on the emulated GPU: threads, which are fibers, in warps, in the CTAs of a cluster. For
// the emulator's own files.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <csetjmp>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "machine.h"
#include "mma_registers.h"
#include "races.h"

namespace emulator {

inline constexpr int kMostAtOnce = 16;  // CTAs

struct Warp {
  Lanes lanes = {};
  uint32_t arrived = 0, ended = 0;
  const void* kind = nullptr;
  void (*all)(Lanes&) = nullptr;
  unsigned int generation = 0;
  int held = 0;  // rounds in which it stands still
  // MMAs under way, by their groups; the last is open. And how many groups there were before.
  std::deque<std::vector<std::function<void()>>> mmas = {{}};
  int mmas_done = 0;

  bool complete() const { return (arrived | ended) == 0xffffffffu; }
  int mmas_begun() const { return mmas_done + static_cast<int>(mmas.size()) - 1; }
  bool multiplies() const {
    return std::any_of(mmas.begin(), mmas.end(), [](const auto& group) { return !group.empty(); });
  }
  void finish() {
    all(lanes);
    std::memset(lanes, 0, sizeof lanes);
    arrived = 0;
    ++generation;
  }
};

struct Fiber {
  jmp_buf place;
  char* stack = nullptr;
  bool started = false, ended = false;
  const std::function<bool()>* ready = nullptr;
  const char* waits_for = nullptr;
  // Copies under way, by their groups; the last is open.
  std::deque<std::unique_ptr<int>> groups;
  uint32_t groups_begun = 0;  // before the open one
  MmaRegisters registers;
  unsigned int cluster_generation = 0;  // of the cluster's barrier when the thread arrived
};

struct Named {
  int arrived = 0;
  unsigned int generation = 0;
  bool any = false, result = false;
};

struct Copy {
  std::function<void()> run;
  int fiber;   // whose, where it is of a group
  int* group;  // or null
  int rounds;  // until it comes
  uint64_t number;
  bool after_others;  // of the fiber that came before
};

struct Cta;
struct Cluster {
  std::array<std::atomic<Cta*>, kMostAtOnce> ctas = {};  // those that have begun and not ended
  std::atomic<int> arrived{0};
  std::atomic<unsigned int> generation{0};
  std::vector<std::shared_ptr<void>> all;  // its CTAs: one may look at another that just ends
  Races races;

  explicit Cluster(const Grid& grid) : races(grid.cluster, grid.threads, grid.shared_bytes) {}
};

struct Cta {
  const Grid& grid;
  const std::function<void()>& kernel;
  Dim3 index;
  Cluster* cluster;
  int rank;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Named named[16];
  std::deque<Copy> copies;
  uint64_t copies_begun = 0;
  std::mt19937 random;
  std::atomic<char*> shared{nullptr};  // its first byte
  jmp_buf scheduler;
  int current = 0, alive = 0;
  bool went_on = false;
  // What runs now is what an MMA or a copy does, whose accesses were looked at when it was issued.
  bool asynchronous = false;

  Cta(const Grid& grid, const std::function<void()>& kernel)
      : grid(grid), kernel(kernel), fibers(grid.threads), warps((grid.threads + 31) / 32) {
    alive = grid.threads;
    // Lanes that a CTA has not.
    if (grid.threads % 32) warps.back().ended = ~0u << grid.threads % 32;
  }
  void run();
  Races::Thread thread() const { return {rank, current}; }
  int delay();  // of a copy or a warp, in rounds

 private:
  void resume(int number);
  void run_warp(int number);
  void pass_rounds();
  void run_copies();
  [[noreturn]] void give_up() const;
};

extern thread_local Cta* cta;  // that runs on this thread, or null

[[noreturn]] void fail(const std::string& what);
inline Races& races() { return cta->cluster->races; }
Races::Place place_of(uint32_t address);
// Ends the program if two have touched the same memory, unless nobody looks at what came of it.
void check(const Races::Conflict& conflict);

}  // namespace emulator
