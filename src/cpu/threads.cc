#include "cpu/threads.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "core/text.h"

namespace flashmoe::cpu {
namespace {

constexpr int kMaxThreads =
    1024;  // beyond any machine we know; a typo should not start a million threads

// Empty or not set: nobody asks.
const char* asked_for() {
  const char* asked = std::getenv("FLASHMOE_NUM_THREADS");
  return asked && *asked ? asked : nullptr;
}
// 0 when nobody asks, or not for a number from 1 to kMaxThreads.
int threads_asked_for() {
  const char* asked = asked_for();
  if (!asked) return 0;
  int threads = 0;
  const char* end = asked + std::strlen(asked);
  const auto [stop, error] = std::from_chars(asked, end, threads);
  const bool good = error == std::errc() && stop == end && threads >= 1 && threads <= kMaxThreads;
  return good ? threads : 0;
}

int cpus_to_run_on() {
#ifdef __linux__
  cpu_set_t mask;  // fails on machines with more CPUs than the mask holds
  if (sched_getaffinity(0, sizeof mask, &mask) == 0) return CPU_COUNT(&mask);
#endif
  return static_cast<int>(std::thread::hardware_concurrency());
}

class Pool {
 public:
  // `abandoned` is the pool of a process that forked into this one. Its threads do not exist here
  // and its mutex may be locked for ever, so it is kept, untouched, where leak checkers can see it.
  Pool(int threads, Pool* abandoned) : abandoned_(abandoned) {
    try {
      for (int i = 1; i < threads; ++i) threads_.emplace_back([this] { serve(); });
    } catch (const std::system_error&) {
      // The system gives no more threads. Those that started, at least the caller, do the work.
    }
  }

  bool of_this_process() const { return pid_ == getpid(); }

  // False when someone else has it. An owner that never releases it keeps everyone else out.
  bool acquire() { return !busy_.test_and_set(std::memory_order_acquire); }
  void release() { busy_.clear(std::memory_order_release); }

  void run(int tasks, const std::function<void(int)>& task) {
    std::unique_lock lock(mutex_);
    task_ = &task;
    next_ = 0;
    tasks_ = unfinished_ = tasks;
    const int helpers = std::min<int>(tasks - 1, static_cast<int>(threads_.size()));
    for (int i = 0; i < helpers; ++i) work_.notify_one();
    take_tasks(lock);
    done_.wait(lock, [this] { return unfinished_ == 0; });
  }

  void stop() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    work_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

 private:
  void serve() {
    std::unique_lock lock(mutex_);
    while (!stopping_) {
      take_tasks(lock);
      work_.wait(lock, [this] { return stopping_ || next_ < tasks_; });
    }
  }

  // Tasks are handed out under the lock: there are few, about one per thread, and each is long.
  void take_tasks(std::unique_lock<std::mutex>& lock) {
    while (next_ < tasks_) {
      const int index = next_++;
      const std::function<void(int)>& task = *task_;
      lock.unlock();
      task(index);
      lock.lock();
      if (--unfinished_ == 0) done_.notify_one();
    }
  }

  const pid_t pid_ = getpid();
  [[maybe_unused]] Pool* const abandoned_;
  std::atomic_flag busy_ = ATOMIC_FLAG_INIT;

  std::mutex mutex_;  // guards what follows
  std::condition_variable work_, done_;
  const std::function<void(int)>* task_ = nullptr;
  int tasks_ = 0, next_ = 0, unfinished_ = 0;
  bool stopping_ = false;

  std::vector<std::thread> threads_;
};

// A bare pointer and no lock: a lock that some thread holds during fork() stays locked in the
// child.
constinit std::atomic<Pool*> the_pool{nullptr};

Pool& pool_of_this_process() {
  Pool* current = the_pool.load(std::memory_order_acquire);
  while (!current || !current->of_this_process()) {
    Pool* fresh = new Pool(pool_threads(), current);
    if (the_pool.compare_exchange_strong(current, fresh, std::memory_order_acq_rel)) return *fresh;
    fresh->stop();  // another thread was first
    delete fresh;
  }
  return *current;
}

// When the process exits or the library is unloaded, the threads end first. A pool in the middle of
// a call (a thread still computing while another exits) is left alone; so is the parent's after a
// fork.
struct StopAtExit {
  ~StopAtExit() {
    Pool* pool = the_pool.load(std::memory_order_acquire);
    if (pool && pool->of_this_process() && pool->acquire()) pool->stop();  // and never released
  }
} stop_at_exit;

void run_on_pool(int tasks, const std::function<void(int)>& task) {
  if (tasks > 1 && pool_threads() > 1) {
    Pool& pool = pool_of_this_process();
    if (pool.acquire()) {
      pool.run(tasks, task);
      pool.release();
      return;
    }
  }
  for (int i = 0; i < tasks; ++i) task(i);
}

}  // namespace

int pool_threads() {
  // Two threads that come here first compute the same number; a static's lock could not survive
  // fork().
  static constinit std::atomic<int> cached{0};
  int threads = cached.load(std::memory_order_relaxed);
  if (threads == 0) {
    threads = threads_asked_for();
    if (threads == 0) threads = std::clamp(cpus_to_run_on(), 1, kMaxThreads);
    cached.store(threads, std::memory_order_relaxed);
  }
  return threads;
}

Status check_pool() {
  static constinit std::atomic<bool> good{false};  // once it is, nobody asks the environment again
  if (good.load(std::memory_order_relaxed)) return {};
  if (asked_for() && !threads_asked_for()) {
    return invalid("FLASHMOE_NUM_THREADS is ", asked_for(), "; it must be a number from 1 to ",
                   kMaxThreads);
  }
  good.store(true, std::memory_order_relaxed);
  return {};
}

ParallelFor pool() { return run_on_pool; }

int workers_for(const Device& device, int64_t items) {
  const int threads = device.num_threads ? device.num_threads : pool_threads();
  return static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(threads, items)));
}

void run_items(int64_t items, int workers, const Launch& launch,
               const std::function<void(int64_t, int)>& item) {
  if (items <= 0) return;
  const ParallelFor parallel = launch.parallel ? launch.parallel : pool();
  std::atomic<int64_t> next{0};
  parallel(static_cast<int>(std::min<int64_t>(workers, items)), [&](int worker) {
    for (int64_t i = next++; i < items; i = next++) item(i, worker);
  });
}

}  // namespace flashmoe::cpu
