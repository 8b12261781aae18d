#undef _FORTIFY_SOURCE  // jumps between stacks are what fibers do
#include "machine.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <climits>
#include <condition_variable>
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

namespace emulator {
namespace {

constexpr size_t kStackBytes = 256 << 10, kGuardBytes = 4096 << 2;
constexpr int kMostAtOnce = 16;  // CTAs
constexpr auto kPatience = std::chrono::seconds(20);

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

  Cta(const Grid& grid, const std::function<void()>& kernel)
      : grid(grid), kernel(kernel), fibers(grid.threads), warps((grid.threads + 31) / 32) {
    alive = grid.threads;
    // Lanes that a CTA has not.
    if (grid.threads % 32) warps.back().ended = ~0u << grid.threads % 32;
  }
  void run();
  int delay();  // of a copy or a warp, in rounds

 private:
  void resume(int number);
  void run_warp(int number);
  void pass_rounds();
  void run_copies();
  [[noreturn]] void give_up() const;
};

// The stacks of a CTA's threads, with pages between them that nobody may touch. CTAs that come
// later use them again.
class Stacks {
 public:
  explicit Stacks(std::vector<Fiber>& fibers) {
    const std::lock_guard lock(mutex());
    for (Fiber& fiber : fibers) {
      if (unused().empty()) unused().push_back(make());
      fiber.stack = unused().back();
      unused().pop_back();
    }
  }
  static void give_back(const std::vector<Fiber>& fibers) {
    const std::lock_guard lock(mutex());
    for (const Fiber& fiber : fibers) unused().push_back(fiber.stack);
  }

 private:
  static std::mutex& mutex() {
    static std::mutex one;
    return one;
  }
  static std::vector<char*>& unused() {
    static std::vector<char*> all;
    return all;
  }
  static char* make() {
    void* const memory = mmap(nullptr, kGuardBytes + kStackBytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, kGuardBytes, PROT_NONE) != 0) {
      std::perror("emulator: no memory for a stack");
      std::_Exit(3);
    }
    return static_cast<char*>(memory) + kGuardBytes;
  }
};

thread_local Cta* cta = nullptr;
std::mutex mutex;  // of mbarriers, which other CTAs of a cluster may reach

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "emulator: %s (CTA %u %u %u, thread %u)\n", what.c_str(), blockIdx.x,
               blockIdx.y, blockIdx.z, threadIdx.x);
  std::_Exit(3);
}

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
  }
  _longjmp(own.scheduler, 1);
}

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
    copy.run();
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
  const Stacks stacks(fibers);
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
  Stacks::give_back(fibers);
  cta = nullptr;
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
  std::vector<std::unique_ptr<Cluster>> clusters(ctas / grid.cluster);
  for (auto& cluster : clusters) cluster = std::make_unique<Cluster>();
  for (int64_t number = 0; number < ctas; ++number) {
    {
      std::unique_lock lock(turn);
      ended.wait(lock, [&] { return running < kMostAtOnce; });
      ++running;
    }
    Cluster* const cluster = clusters[number / grid.cluster].get();
    threads.emplace_back([&, number, cluster] {
      auto one = std::make_unique<Cta>(grid, kernel);
      one->index = {static_cast<unsigned int>(number % grid.ctas.x),
                    static_cast<unsigned int>(number / grid.ctas.x % grid.ctas.y),
                    static_cast<unsigned int>(number / grid.ctas.x / grid.ctas.y)};
      one->cluster = cluster;
      one->rank = static_cast<int>(number % grid.cluster);
      one->random.seed(static_cast<unsigned int>(number));
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

void begin_mma(const std::function<void()>& mma) {
  if (!cta) return mma();
  Warp& warp = cta->warps[cta->current / 32];
  if (!warp.multiplies() && cta->random() % 2) return mma();
  warp.mmas.back().push_back(mma);
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
      for (const auto& mma : warp->mmas.front()) mma();
      warp->mmas.pop_front();
    }
  }
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

void cluster_arrive() {
  Cluster& cluster = *cta->cluster;
  cta->fibers[cta->current].cluster_generation = cluster.generation.load();
  if (++cluster.arrived == cta->grid.threads * cta->grid.cluster) {
    cluster.arrived = 0;
    ++cluster.generation;
  }
}
void cluster_wait() {
  const unsigned int arrived = cta->fibers[cta->current].cluster_generation;
  wait_until("its cluster", [=] { return cta->cluster->generation.load() != arrived; });
}

bool barrier(int name, int threads, bool mine, bool waits) {
  if (!cta) return mine;
  Named& named = cta->named[name];
  const unsigned int generation = named.generation;
  named.any |= mine;
  if (++named.arrived == (name == 0 ? cta->alive : threads)) {
    named = {.generation = generation + 1, .result = named.any};
  } else if (waits) {
    static const std::string words[] = {"barrier 0",  "barrier 1",  "barrier 2",  "barrier 3",
                                        "barrier 4",  "barrier 5",  "barrier 6",  "barrier 7",
                                        "barrier 8",  "barrier 9",  "barrier 10", "barrier 11",
                                        "barrier 12", "barrier 13", "barrier 14", "barrier 15"};
    wait_until(words[name].c_str(), [&] { return named.generation != generation; });
  }
  return named.result;
}

namespace {

struct Mbarrier {
  int16_t count, pending;
  uint32_t tx_and_phase;  // bytes that are yet to come x 2, and the phase's parity

  void end_phase() {
    if (pending > 0 || tx_and_phase >> 1) return;
    pending = count;
    tx_and_phase ^= 1;
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
}
void arrive(uint32_t barrier, int expected_bytes) {
  const std::lock_guard lock(mutex);
  Mbarrier& b = mbarrier_at(barrier);
  if (b.pending <= 0) fail("more arrivals than an mbarrier waits for");
  b.tx_and_phase += 2 * expected_bytes;
  --b.pending;
  b.end_phase();
}
void complete(uint32_t barrier, int bytes) {
  const std::lock_guard lock(mutex);
  Mbarrier& b = mbarrier_at(barrier);
  b.tx_and_phase -= 2 * bytes;
  b.end_phase();
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
}
void wait_for_copies(int pending) {
  auto& groups = cta->fibers[cta->current].groups;
  while (static_cast<int>(groups.size()) > pending + 1) {
    wait_until("its copies", [&] { return *groups.front() == 0; });
    groups.pop_front();
  }
}

void copy_box(const void* map, const int (&at)[5], uint32_t address, bool to_shared) {
  TensorMapContents m;
  std::memcpy(&m, map, sizeof m);
  int64_t rows = 1;
  for (int i = 1; i < m.rank; ++i) rows *= m.box[i];
  const int row_bytes = m.box[0] * m.element_bytes;
  for (int64_t row = 0; row < rows; ++row) {
    int64_t rest = row;
    char* from = m.address;
    bool inside = true;
    for (int i = 1; i < m.rank; ++i) {
      const int64_t c = at[i] + rest % m.box[i];
      rest /= m.box[i];
      inside = inside && c >= 0 && c < static_cast<int64_t>(m.sizes[i]);
      from += c * static_cast<int64_t>(m.strides[i - 1]);
    }
    for (int i = 0; i < m.box[0]; ++i) {
      const int64_t c = int64_t{at[0]} + i;
      const uint32_t plain = address + static_cast<uint32_t>(row * row_bytes + i * m.element_bytes);
      // 1: 32 bytes, 2: 64, 3: 128.
      const uint32_t mask = (1u << m.swizzle) - 1;
      char* const here =
          shared(plain ^ (plain - kBase) / 128 % 8 % (mask + 1) * 16, m.element_bytes);
      char* const there = from + c * m.element_bytes;
      const bool exists = inside && c >= 0 && c < static_cast<int64_t>(m.sizes[0]);
      if (to_shared && exists) std::memcpy(here, there, m.element_bytes);
      if (to_shared && !exists) std::memset(here, 0, m.element_bytes);
      if (!to_shared && exists) std::memcpy(there, here, m.element_bytes);
    }
  }
}

}  // namespace emulator
