// Who does a call's work items: the caller's threads, or else the library's own.
#pragma once

#include <cstdint>
#include <functional>

#include "flashmoe/device.h"
#include "flashmoe/status.h"

namespace flashmoe::cpu {

// Threads that work on a call, the caller included: FLASHMOE_NUM_THREADS, or else every CPU this
// process may run on. Read once.
int pool_threads();
// Refuses a FLASHMOE_NUM_THREADS that is no number of threads.
Status check_pool();

// Runs tasks on a pool of that many threads, started at first use. A call made while the pool is
// busy, from another thread or from inside a task, runs on its caller alone, so nothing ever waits
// in a queue or deadlocks. Tasks must not throw.
ParallelFor pool();

// How many of `items` are in flight at once, at least 1.
int workers_for(const Device& device, int64_t items);

// Runs item(0, worker) .. item(items - 1, worker), each on whichever worker is free next.
void run_items(int64_t items, int workers, const Launch& launch,
               const std::function<void(int64_t, int)>& item);

}  // namespace flashmoe::cpu
