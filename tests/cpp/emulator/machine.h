// A GPU on the host, to run kernels where there is none. Device code is C++, and its PTX is in one
// place, src/cuda/ptx: compiled with emulator/ before src/ among its include paths, it gets the
// same functions from emulator/cuda/ptx.
//
// A CTA is a thread of the host, so that CTAs run side by side; its threads are fibers, which run
// until they wait for something. What a warp does together, its last lane does for all. Copies and
// MMAs of warpgroups are done some time later, at random, and warps are held up: who does not wait
// for them finds old numbers, or that they read new ones. Accesses to shared memory that nothing
// orders end the program (races.h). Global memory is as coherent as the host's: of fences that are
// missing there nothing is noticed.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

struct Dim3 {
  unsigned int x = 1, y = 1, z = 1;
};
// Which thread of which CTA the code is that runs.
inline thread_local Dim3 threadIdx{0, 0, 0}, blockIdx{0, 0, 0}, blockDim, gridDim;

namespace emulator {

struct Grid {
  Dim3 ctas;
  int threads, shared_bytes, cluster = 1;
  std::string kernel;
};
// Runs kernel() as every thread of the grid. Ends the program with a word about who waits for what
// if nothing goes on any more.
void run(const Grid& grid, const std::function<void()>& kernel);

// Of the thread that runs:

// Lets others go on.
void yield();
// Waits until ready() is true, which is asked by others while they run.
void wait_until(const char* what, const std::function<bool()>& ready);

// What all 32 lanes of the warp do together, but for those that have ended; outside of kernels a
// thread is alone. Each gives its `argument`, of which the last to come has all (null where a lane
// has ended): it reads and writes them.
using Lanes = void* [32];
void collective(const void* kind, void* argument, void (*all)(Lanes& lanes));
void lanes_meet();  // within __syncwarp(): what one knows of others' doing, all know (races.h)

// MMAs of a warpgroup. Its warps begin each by themselves, by one lane for all (see collective()):
// it is done at once or, by chance, when one of them waits for all groups of MMAs but the last
// ones. That they do for the whole warpgroup: who has waited knows that no warp reads an operand
// any more.
void begin_mma(const std::function<void()>& mma);
void commit_mmas();
void wait_for_mmas(int pending);

// The byte of shared memory at an address. From `kBase` on it is the CTA's own; of a cluster's CTA
// `rank`, (rank + 1) << 24 above that.
inline constexpr uint32_t kBase = 1024;
char* shared(uint32_t address, int bytes);
uint32_t shared_address(const void* memory);  // of dynamic shared memory: its beginning, at first
void clear_shared(int bytes);                 // to NaN, before a CTA begins
int cluster_rank();
// The barrier of all threads of the cluster, in two steps.
void cluster_arrive(bool relaxed = false);
void cluster_wait();

// Named barriers of the CTA; 0 is that of all its threads. Returns whether any had `mine`.
bool barrier(int name, int threads, bool mine, bool waits = true);

// mbarriers.
void init(uint32_t barrier, int count);
void arrive(uint32_t barrier, int expected_bytes = 0);
void complete(uint32_t barrier, int bytes);
void wait(uint32_t barrier, int parity);

// Asynchronous copies. Later, as a copy of this thread's open group, or as one that a barrier
// counts.
void later(const std::function<void()>& copy, bool of_group);
void commit_copies();
void wait_for_copies(int pending = 0);  // for all groups but the last ones
// When all copies of its groups have come that this thread has begun.
void when_copied(const std::function<void()>& then);

// What is asked when something touches shared memory, of races (races.h), or registers of MMAs
// (mma_registers.h): these end the program.
void accessed(const void* memory, int bytes, bool writes);  // by the thread, as a compiler tells
// What is wrong with what the MMA reads that is being issued: nobody may look at its sums then.
std::string mma_reads(uint32_t address, int bytes);
// And the registers that it uses of a lane: an operand, or null, and sums.
void mma_registers(int lane, const uint32_t* operand, const float* sums, int count, bool adds,
                   const std::string& wrong);
void mma_fence();                              // wgmma.fence
void copy_reads(uint32_t address, int bytes);  // a copy of the thread's open group
// Those of a copy that a barrier counts.
void copy_reads(uint32_t address, int bytes, uint32_t barrier);
void copy_writes(uint32_t address, int bytes, uint32_t barrier);
// Fences between what threads do and what copies and MMAs do; of mbarriers alone.
void fence();
void fence_barriers();

// What of a tensor map TMA needs.
struct TensorMapContents {
  uint64_t magic;
  char* address;
  uint64_t sizes[5], strides[4];
  uint16_t box[5];
  uint8_t rank, element_bytes, swizzle;  // as the driver's enumeration has it
};
// Copies the box at `at` of a tensor to or from shared memory (at(address) is its byte).
void copy_box(const void* map, const int (&at)[5], uint32_t address, bool to_shared);

}  // namespace emulator
