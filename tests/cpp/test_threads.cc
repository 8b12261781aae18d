// The library's own threads. Built with src/cpu/threads.cc, whose functions the library does not
// export.
#define TESTING_OWN_MAIN
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <barrier>
#include <cstdlib>
#include <functional>
#include <thread>

#include "cpu/threads.h"
#include "flashmoe/attention.h"
#include "testing.h"

using flashmoe::cpu::pool;
using flashmoe::cpu::pool_threads;

namespace {

constexpr int kThreads = 4;

bool in_child = false;

// Each of `tasks` tasks ran once.
bool runs_each_once(int tasks) {
  std::vector<std::atomic<int>> count(tasks);
  pool()(tasks, [&](int i) { ++count[i]; });
  for (const auto& c : count) {
    if (c != 1) return false;
  }
  return true;
}

// Runs `body` in a forked child that must end by itself, through exit(), within 20 seconds.
int exit_code_of_child(const std::function<int()>& body) {
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    in_child = true;
    alarm(20);
    std::exit(body());
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

int threads_with(const char* setting) {
  return exit_code_of_child([&] {
    setenv("FLASHMOE_NUM_THREADS", setting, 1);
    return pool_threads();
  });
}

int threads_without_setting() {
  return exit_code_of_child([] {
    unsetenv("FLASHMOE_NUM_THREADS");
    return pool_threads();
  });
}

// Whether calls on the library's threads are refused, and others not.
bool refuses(const char* setting) {
  setenv("FLASHMOE_NUM_THREADS", setting, 1);
  flashmoe::AttentionProblem p;
  p.query = p.key = p.value = p.out = flashmoe::contiguous(flashmoe::DType::kFloat32, {1, 1, 4, 8});
  const auto planned = flashmoe::plan(p);
  p.device.num_threads = 2;
  return flashmoe::plan(p).ok() && !planned.ok() &&
         planned.status().message().find(std::string("FLASHMOE_NUM_THREADS is ") + setting +
                                         "; it must be a number from 1 to 1024") !=
             std::string::npos;
}

}  // namespace

// LeakSanitizer takes seconds to look at a process; one look, at the parent, is enough.
extern "C" __attribute__((visibility("default"))) int __lsan_is_turned_off() { return in_child; }

// First, because the number is read once per process and children inherit it.
TEST(size_comes_from_the_environment) {
  CHECK_EQ(threads_with("3"), 3);
  CHECK_EQ(threads_with("1"), 1);
  const int usual = threads_without_setting();
  CHECK(usual >= 1);
  CHECK_EQ(threads_with(""), usual);
  for (const char* bad : {"0", "-2", "two", "3x", " 3", "99999999999999999999", "1000000"}) {
    const testing::Note note("FLASHMOE_NUM_THREADS is \"", bad, "\"");
    CHECK_EQ(threads_with(bad), usual);
    CHECK_EQ(exit_code_of_child([&] { return refuses(bad); }), 1);
  }
}

TEST(every_task_runs_once) {
  CHECK_EQ(pool_threads(), kThreads);
  for (int tasks : {0, 1, 2, kThreads, 7, 1000}) {
    for (int repeat = 0; repeat < 50; ++repeat) CHECK(runs_each_once(tasks), tasks);
  }
}

// No task gets past the barrier before all have arrived, so this hangs unless they run at the same
// time.
TEST(tasks_run_side_by_side) {
  std::barrier all_here(kThreads);
  pool()(kThreads, [&](int) { all_here.arrive_and_wait(); });
}

TEST(several_callers_at_once) {
  std::vector<std::thread> callers;
  std::atomic<int> wrong{0};
  for (int i = 0; i < 8; ++i) {
    callers.emplace_back([&] {
      for (int repeat = 0; repeat < 100; ++repeat) wrong += !runs_each_once(5);
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK_EQ(wrong.load(), 0);
}

TEST(tasks_may_call_the_pool) {
  std::atomic<int> wrong{0};
  pool()(6, [&](int) { pool()(3, [&](int) { wrong += !runs_each_once(4); }); });
  CHECK_EQ(wrong.load(), 0);
  CHECK(runs_each_once(4));
}

#ifndef __SANITIZE_THREAD__  // ThreadSanitizer allows no new threads after a fork
TEST(a_forked_child_has_a_pool_of_its_own) {
  CHECK(runs_each_once(10));
  const auto use_twice = [] { return runs_each_once(10) && runs_each_once(3) ? 0 : 1; };
  CHECK_EQ(exit_code_of_child(use_twice), 0);
  CHECK_EQ(exit_code_of_child([] { return 0; }), 0);  // never uses it
  CHECK_EQ(exit_code_of_child([&] { return exit_code_of_child(use_twice); }), 0);
  CHECK(runs_each_once(10));
}

TEST(fork_while_the_pool_is_busy) {
  std::atomic<bool> stop{false};
  std::atomic<int> runs{0};
  // Allocates nothing: in a child, AddressSanitizer's allocator stays locked if a thread was in it.
  std::thread busy([&] {
    while (!stop) pool()(4, [&](int) { ++runs; });
  });
  while (runs == 0) std::this_thread::yield();
  for (int repeat = 0; repeat < 20; ++repeat) {
    CHECK_EQ(exit_code_of_child([] { return runs_each_once(10) ? 0 : 1; }), 0);
  }
  stop = true;
  busy.join();
}

TEST(exit_while_the_pool_is_busy) {
  const int code = exit_code_of_child([] {
    static std::atomic<bool> started{false};
    std::thread([] {
      pool()(kThreads, [](int) {
        started = true;
        pause();
      });
    }).detach();
    while (!started) std::this_thread::yield();
    return 7;
  });
  CHECK_EQ(code, 7);
}
#endif

int main(int argc, char** argv) {
  setenv("FLASHMOE_NUM_THREADS", std::to_string(kThreads).c_str(), 1);
  return testing::run_all(argc, argv);
}
