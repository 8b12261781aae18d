// The library's own threads, for callers that bring none.
#pragma once

#include "flashmoe/attention.h"

namespace flashmoe::cpu {

// Threads that work on a call, the caller included: FLASHMOE_NUM_THREADS, or else every CPU this
// process may run on. Read once.
int pool_threads();

// Runs tasks on a pool of that many threads, started at first use. A call made while the pool is
// busy, from another thread or from inside a task, runs on its caller alone, so nothing ever waits
// in a queue or deadlocks. Tasks must not throw.
ParallelFor pool();

}  // namespace flashmoe::cpu
