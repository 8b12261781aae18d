// What the files of the program test_cuda share: processes of their own for tests, and memory for
// tensor maps.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <functional>

#include "fake_libcuda.h"
#include "testing.h"

namespace testing {

alignas(16) inline char memory[32];  // for tensor maps

inline int exit_code_of_child(const std::function<void()>& body) {
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);  // a child that hangs must not hang the test
    failures = 0;
    body();
    std::fflush(stdout);
    _exit(failures ? 1 : 0);  // past the leak checker, which takes seconds each time
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// The library keeps what it finds for the life of the process, so each case gets its own. Also
// shows that a fork before CUDA is used does no harm.
inline void in_process_of_its_own(const std::function<void()>& body) {
  CHECK_EQ(exit_code_of_child(body), 0);
}

}  // namespace testing
