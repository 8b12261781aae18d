#undef _FORTIFY_SOURCE  // jumps between stacks are what fibers do
#include "machine.h"

#include <ucontext.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <condition_variable>
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "cta.h"
#include "stacks.h"

namespace emulator {

thread_local Cta* cta = nullptr;

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "emulator: %s (%s, CTA %u %u %u, thread %u)\n", what.c_str(),
               cta ? cta->grid.kernel.c_str() : "", blockIdx.x, blockIdx.y, blockIdx.z,
               threadIdx.x);
  std::abort();
}

namespace {

constexpr auto kPatience = std::chrono::seconds(20);

std::mutex mutex;  // of mbarriers, which other CTAs of a cluster may reach

void fiber_main() {
  Cta& own = *cta;
  own.kernel();
  Fiber& fiber = own.fibers[own.current];
  fiber.ended = true;
  --own.alive;
  Warp& warp = own.warps[own.current / 32];
  if (warp.multiplies()) fail("a warp ends before its MMAs");
  warp.ended |= 1u << own.current % 32;
  if (warp.arrived && warp.complete()) warp.finish();
  // A barrier of all threads is of those that there are.
  Named& all = own.named[0];
  if (own.alive > 0 && all.arrived == own.alive) {
    all = {.generation = all.generation + 1, .result = all.any};
    races().end_named(own.thread(), 0);
  }
  _longjmp(own.scheduler, 1);
}

}  // namespace

void Cta::resume(int number) {
  Fiber& fiber = fibers[number];
  current = number;
  threadIdx.x = number;
  if (_setjmp(scheduler)) return;
  if (fiber.started) _longjmp(fiber.place, 1);
  fiber.started = true;
  ucontext_t context;
  getcontext(&context);
  context.uc_stack = {.ss_sp = fiber.stack, .ss_flags = 0, .ss_size = kStackBytes};
  context.uc_link = nullptr;
  makecontext(&context, fiber_main, 0);
  setcontext(&context);
}

// A few, or as many as steps of a kernel take.
int Cta::delay() { return static_cast<int>(random() % 4 ? random() % 4 : random() % 2048); }

// Where all others wait: as many rounds as until a copy comes or a warp goes on.
void Cta::pass_rounds() {
  int rounds = INT_MAX;
  for (const Warp& warp : warps) {
    if (warp.held > 0) rounds = std::min(rounds, warp.held);
  }
  for (const Copy& copy : copies) rounds = std::min(rounds, copy.rounds);
  for (Warp& warp : warps) warp.held = std::max(warp.held - rounds, 0);
  for (Copy& copy : copies) copy.rounds -= rounds;
  went_on = rounds < INT_MAX;
}

void Cta::run_copies() {
  const auto waits_for = [](const Copy& copy, const Copy& other) {
    return other.group && other.fiber == copy.fiber && other.number < copy.number;
  };
  for (size_t i = copies.size(); i > 0; --i) {
    Copy copy = std::move(copies.front());
    copies.pop_front();
    const bool waits =
        copy.after_others && std::any_of(copies.begin(), copies.end(),
                                         [&](const Copy& other) { return waits_for(copy, other); });
    if (copy.rounds > 0) --copy.rounds;
    if (waits || copy.rounds > 0) {
      copies.push_back(std::move(copy));
      continue;
    }
    current = copy.fiber;
    asynchronous = true;
    copy.run();
    asynchronous = false;
    if (copy.group) --*copy.group;
    went_on = true;
  }
}

void Cta::give_up() const {
  std::map<std::string, std::pair<int, int>> waiting;  // how many, and one of them
  for (size_t i = 0; i < fibers.size(); ++i) {
    if (fibers[i].ended) continue;
    auto& [count, one] = waiting[fibers[i].waits_for ? fibers[i].waits_for : "others"];
    ++count;
    one = static_cast<int>(i);
  }
  for (const auto& [what, who] : waiting) {
    std::fprintf(stderr, "emulator: CTA %u: %d threads, %d among them, wait for %s\n", index.x,
                 who.first, who.second, what.c_str());
  }
  std::_Exit(3);
}

// A warp's turn. Any may be held up while others can go on: what does not wait for it shows.
void Cta::run_warp(int number) {
  Warp& warp = warps[number];
  if (warp.held == 0 && random() % 16 == 0) warp.held = delay();
  if (warp.held > 0) {
    --warp.held;
    return;
  }
  for (int i = 32 * number; i < std::min(32 * number + 32, grid.threads); ++i) {
    Fiber& fiber = fibers[i];
    if (fiber.ended || (fiber.ready && !(*fiber.ready)())) continue;
    if (fiber.ready || !fiber.started) went_on = true;
    resume(i);
  }
}

void Cta::run() {
  cta = this;
  blockIdx = index;
  gridDim = grid.ctas;
  blockDim = {static_cast<unsigned int>(grid.threads), 1, 1};
  for (Fiber& fiber : fibers) fiber.stack = take_stack();
  clear_shared(grid.shared_bytes);
  auto last = std::chrono::steady_clock::now();
  while (alive > 0 || !copies.empty()) {
    went_on = false;
    const size_t first = random() % warps.size();
    for (size_t i = 0; i < warps.size(); ++i) run_warp((first + i) % warps.size());
    run_copies();
    if (!went_on) pass_rounds();
    if (went_on) {
      last = std::chrono::steady_clock::now();
    } else {
      if (std::chrono::steady_clock::now() - last > kPatience) give_up();
      std::this_thread::yield();
    }
  }
  for (const Fiber& fiber : fibers) give_back_stack(fiber.stack);
  cta = nullptr;
}

namespace {

void multiply(const std::function<void()>& mma) {
  cta->asynchronous = true;
  mma();
  cta->asynchronous = false;
}

void jump_to_scheduler() {
  Fiber& fiber = cta->fibers[cta->current];
  if (!_setjmp(fiber.place)) _longjmp(cta->scheduler, 1);
}

}  // namespace

void run(const Grid& grid, const std::function<void()>& kernel) {
  const int64_t ctas = int64_t{grid.ctas.x} * grid.ctas.y * grid.ctas.z;
  std::mutex turn;
  std::condition_variable ended;
  int running = 0;
  std::vector<std::thread> threads;
  std::shared_ptr<Cluster> cluster;
  for (int64_t number = 0; number < ctas; ++number) {
    {
      std::unique_lock lock(turn);
      ended.wait(lock, [&] { return running < kMostAtOnce; });
      ++running;
    }
    if (number % grid.cluster == 0) cluster = std::make_shared<Cluster>(grid);
    threads.emplace_back([&, number, cluster] {
      const auto one = std::make_shared<Cta>(grid, kernel);
      one->index = {static_cast<unsigned int>(number % grid.ctas.x),
                    static_cast<unsigned int>(number / grid.ctas.x % grid.ctas.y),
                    static_cast<unsigned int>(number / grid.ctas.x / grid.ctas.y)};
      one->cluster = cluster.get();
      one->rank = static_cast<int>(number % grid.cluster);
      one->random.seed(static_cast<unsigned int>(number));
      {
        const std::lock_guard lock(turn);
        cluster->all.push_back(one);
      }
      cluster->ctas[one->rank] = one.get();
      one->run();
      cluster->ctas[one->rank] = nullptr;
      std::lock_guard lock(turn);
      --running;
      ended.notify_one();
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void yield() {
  if (!cta) return;
  cta->fibers[cta->current].ready = nullptr;
  jump_to_scheduler();
}

void wait_until(const char* what, const std::function<bool()>& ready) {
  if (ready()) return;
  Fiber& fiber = cta->fibers[cta->current];
  fiber.waits_for = what;
  fiber.ready = &ready;
  jump_to_scheduler();
  fiber.ready = nullptr;
  fiber.waits_for = nullptr;
}

void collective(const void* kind, void* argument, void (*all)(Lanes&)) {
  if (!cta) {
    Lanes alone = {};
    alone[threadIdx.x % 32] = argument;
    return all(alone);
  }
  const int lane = cta->current % 32;
  Warp& warp = cta->warps[cta->current / 32];
  if (warp.arrived && warp.kind != kind) fail("lanes of a warp do different things together");
  if (warp.arrived >> lane & 1) fail("a lane is there twice");
  warp.kind = kind;
  warp.all = all;
  warp.lanes[lane] = argument;
  warp.arrived |= 1u << lane;
  const unsigned int generation = warp.generation;
  if (warp.complete()) return warp.finish();
  wait_until("its warp", [&] { return warp.generation != generation; });
}

void lanes_meet() {
  if (cta) races().lanes_meet(cta->thread());
}

void begin_mma(const std::function<void()>& mma) {
  if (!cta) return mma();
  Warp& warp = cta->warps[cta->current / 32];
  if (warp.multiplies() || cta->random() % 2) return warp.mmas.back().push_back(mma);
  multiply(mma);
}
void commit_mmas() {
  if (cta) cta->warps[cta->current / 32].mmas.emplace_back();
}
void wait_for_mmas(int pending) {
  if (!cta) return;
  Warp* const group = &cta->warps[cta->current / 128 * 4];
  const int count = cta->warps[cta->current / 32].mmas_begun() - pending;
  const auto each = [&](const auto& f) { return std::all_of(group, group + 4, f); };
  wait_until("the MMAs of its warpgroup",
             [&] { return each([&](const Warp& warp) { return warp.mmas_begun() >= count; }); });
  for (Warp* warp = group; warp < group + 4; ++warp) {
    for (; warp->mmas_done < count; ++warp->mmas_done) {
      for (const auto& mma : warp->mmas.front()) multiply(mma);
      warp->mmas.pop_front();
    }
  }
  races().mmas_done(cta->thread(), static_cast<uint32_t>(count));
  cta->fibers[cta->current].registers.done(static_cast<uint32_t>(count));
}

char* shared(uint32_t address, int bytes) {
  const uint32_t rank = address >> 24, offset = (address & 0xffffff) - kBase;
  const Cta* const owner = rank ? cta->cluster->ctas[rank - 1].load() : cta;
  if (!owner) fail("shared memory of a CTA that has not begun or has ended");
  char* const first = owner->shared.load(std::memory_order_acquire);
  if (!first || (address & 0xffffff) < kBase ||
      offset + bytes > static_cast<uint32_t>(cta->grid.shared_bytes)) {
    fail("shared memory at " + std::to_string(offset) + " is beyond the " +
         std::to_string(cta->grid.shared_bytes) + " bytes that there are");
  }
  return first + offset;
}

uint32_t shared_address(const void* memory) {
  char* const at = static_cast<char*>(const_cast<void*>(memory));
  char* none = nullptr;
  if (cta->shared.compare_exchange_strong(none, at)) {
    if (reinterpret_cast<uintptr_t>(at) % 16) fail("dynamic shared memory is not aligned");
  }
  return static_cast<uint32_t>(at - cta->shared.load()) + kBase;
}

int cluster_rank() { return cta->rank; }

void cluster_arrive(bool relaxed) {
  Cluster& cluster = *cta->cluster;
  races().arrive_named(cta->thread(), Races::kClusterBarrier, relaxed);
  cta->fibers[cta->current].cluster_generation = cluster.generation.load();
  if (++cluster.arrived == cta->grid.threads * cta->grid.cluster) {
    cluster.arrived = 0;
    races().end_named(cta->thread(), Races::kClusterBarrier);
    ++cluster.generation;
  }
}
void cluster_wait() {
  const unsigned int arrived = cta->fibers[cta->current].cluster_generation;
  wait_until("its cluster", [=] { return cta->cluster->generation.load() != arrived; });
  races().waited_named(cta->thread(), Races::kClusterBarrier);
}

bool barrier(int name, int threads, bool mine, bool waits) {
  if (!cta) return mine;
  Named& named = cta->named[name];
  const unsigned int generation = named.generation;
  named.any |= mine;
  races().arrive_named(cta->thread(), name);
  if (++named.arrived == (name == 0 ? cta->alive : threads)) {
    named = {.generation = generation + 1, .result = named.any};
    races().end_named(cta->thread(), name);
  } else if (waits) {
    static const std::string words[] = {"barrier 0",  "barrier 1",  "barrier 2",  "barrier 3",
                                        "barrier 4",  "barrier 5",  "barrier 6",  "barrier 7",
                                        "barrier 8",  "barrier 9",  "barrier 10", "barrier 11",
                                        "barrier 12", "barrier 13", "barrier 14", "barrier 15"};
    wait_until(words[name].c_str(), [&] { return named.generation != generation; });
  }
  if (waits) races().waited_named(cta->thread(), name);
  return named.result;
}

namespace {

struct Mbarrier {
  int16_t count, pending;
  uint32_t tx_and_phase;  // bytes that are yet to come x 2, and the phase's parity

  bool end_phase() {
    if (pending > 0 || tx_and_phase >> 1) return false;
    pending = count;
    tx_and_phase ^= 1;
    return true;
  }
};
static_assert(sizeof(Mbarrier) == 8);
Mbarrier& mbarrier_at(uint32_t address) {
  if (address % 8) fail("an mbarrier is not aligned");
  return *reinterpret_cast<Mbarrier*>(shared(address, 8));
}

}  // namespace

void init(uint32_t barrier, int count) {
  const std::lock_guard lock(mutex);
  mbarrier_at(barrier) = {static_cast<int16_t>(count), static_cast<int16_t>(count), 0};
  check(races().init(cta->thread(), place_of(barrier)));
}
void arrive(uint32_t barrier, int expected_bytes) {
  const std::lock_guard lock(mutex);
  Mbarrier& b = mbarrier_at(barrier);
  check(races().arrive(cta->thread(), place_of(barrier)));
  if (b.pending <= 0) fail("more arrivals than an mbarrier waits for");
  b.tx_and_phase += 2 * expected_bytes;
  --b.pending;
  if (b.end_phase()) races().end_phase(place_of(barrier));
}
void complete(uint32_t barrier, int bytes) {
  const std::lock_guard lock(mutex);
  Mbarrier& b = mbarrier_at(barrier);
  b.tx_and_phase -= 2 * bytes;
  if (b.end_phase()) races().end_phase(place_of(barrier));
}
void wait(uint32_t barrier, int parity) {
  const Mbarrier* const b = &mbarrier_at(barrier);
  thread_local char words[4096][24];
  char* const word = words[cta->current];
  std::snprintf(word, sizeof words[0], "mbarrier at %u", barrier - kBase);
  wait_until(word, [&] {
    const std::lock_guard lock(mutex);
    return (b->tx_and_phase & 1) != static_cast<uint32_t>(parity);
  });
  check(races().waited(cta->thread(), place_of(barrier)));
}

void later(const std::function<void()>& copy, bool of_group) {
  auto& groups = cta->fibers[cta->current].groups;
  if (groups.empty()) groups.push_back(std::make_unique<int>(0));
  int* const group = of_group ? groups.back().get() : nullptr;
  if (group) ++*group;
  cta->copies.push_back({copy, cta->current, group, cta->delay(), cta->copies_begun++, false});
}
void when_copied(const std::function<void()>& then) {
  cta->copies.push_back({then, cta->current, nullptr, 0, cta->copies_begun++, true});
}
void commit_copies() {
  auto& groups = cta->fibers[cta->current].groups;
  if (groups.empty()) groups.push_back(std::make_unique<int>(0));
  groups.push_back(std::make_unique<int>(0));
  ++cta->fibers[cta->current].groups_begun;
}
void wait_for_copies(int pending) {
  auto& groups = cta->fibers[cta->current].groups;
  while (static_cast<int>(groups.size()) > pending + 1) {
    wait_until("its copies", [&] { return *groups.front() == 0; });
    groups.pop_front();
  }
  races().copies_done(cta->thread(), cta->fibers[cta->current].groups_begun - pending);
}

}  // namespace emulator
