// What the emulator takes for a race and what not (emulator/races.h, mma_registers.h): by accesses
// and waits as kernels have them, with one of these left out.
#include "emulator/mma_registers.h"
#include "emulator/races.h"
#include "testing.h"

namespace {

using emulator::Races;

constexpr int kThreads = 256, kBytes = 4096;
constexpr Races::Thread kProducer{0, 0}, kConsumer{0, 128}, kOther{0, 160};
constexpr Races::Place kTile{0, 0}, kFull{0, 2048}, kEmpty{0, 2056};
constexpr int kTileBytes = 512;

// Two mbarriers that everyone knows of.
void init_barriers(Races& races) {
  races.init(kProducer, kFull);
  races.init(kProducer, kEmpty);
  races.fence_barriers(kProducer);
  races.arrive_named(kProducer, 0);
  races.end_named(kProducer, 0);
  for (const Races::Thread thread : {kProducer, kConsumer, kOther}) races.waited_named(thread, 0);
}
struct Cta : Races {
  Cta() : Races(1, kThreads, kBytes) { init_barriers(*this); }
};
bool tells(const Races::Conflict& conflict, const char* word) {
  return conflict.what.find(word) != std::string::npos;
}
bool is_fine(const Races::Conflict& conflict) { return conflict.what.empty(); }

// The producer's copy fills the tile, and all of it has come.
void fill(Cta& cta, bool waits_until_empty = true) {
  if (waits_until_empty) CHECK(is_fine(cta.waited(kProducer, kEmpty)));
  CHECK(is_fine(cta.arrive(kProducer, kFull)));
  CHECK(is_fine(cta.copy_writes(kProducer, kTile, kTileBytes, kFull)));
  cta.end_phase(kFull);
}
void leave(Cta& cta, Races::Thread reader) {
  CHECK(is_fine(cta.arrive(reader, kEmpty)));
  cta.end_phase(kEmpty);
}

}  // namespace

TEST(warps_meet_at_a_barrier) {
  Cta cta;
  CHECK(is_fine(cta.write(kConsumer, kTile, 16)));
  CHECK(is_fine(cta.read({0, 129}, kTile, 4)));  // lanes of a warp are one actor
  CHECK(tells(cta.read(kOther, {0, 12}, 4), "nothing orders"));
  CHECK(is_fine(cta.read(kOther, {0, 16}, 4)));  // next to it
  cta.arrive_named(kConsumer, 1);
  CHECK(is_fine(cta.write(kConsumer, {0, 64}, 4)));
  cta.end_named(kOther, 1);
  cta.waited_named(kOther, 1);
  CHECK(is_fine(cta.read(kOther, kTile, 16)));
  CHECK(tells(cta.read(kOther, {0, 64}, 4), "nothing orders"));  // written after the arrival
  CHECK(tells(cta.write(kConsumer, kTile, 4), "warp 4 wrote over what warp 5 read"));
}

TEST(a_stage_is_waited_for) {
  Cta cta;
  fill(cta);
  CHECK(tells(cta.read(kConsumer, kTile, 16), "copies counted by the mbarrier at 2048 wrote"));
  CHECK(is_fine(cta.waited(kConsumer, kFull)));
  CHECK(is_fine(cta.read(kConsumer, kTile, 16)));
  // Another lane has waited, this one has not, until they meet.
  CHECK(tells(cta.read({0, 130}, {0, 32}, 16), "nothing orders"));
  cta.lanes_meet(kConsumer);
  CHECK(is_fine(cta.read({0, 130}, {0, 32}, 16)));
}

TEST(a_stage_is_free_when_its_readers_say_so) {
  for (const bool left : {false, true}) {
    Cta cta;
    fill(cta);
    CHECK(is_fine(cta.waited(kConsumer, kFull)));
    CHECK(is_fine(cta.read(kConsumer, kTile, 16)));
    if (left) leave(cta, kConsumer);
    CHECK(is_fine(cta.waited(kProducer, kEmpty)));
    CHECK(is_fine(cta.copy_writes(kProducer, kTile, kTileBytes, kFull)) == left);
  }
}

// The stage is left while MMAs still read it, or when they are done.
TEST(mmas_are_waited_for) {
  for (const bool done : {false, true}) {
    Cta cta;
    fill(cta);
    CHECK(is_fine(cta.waited(kConsumer, kFull)));
    CHECK(is_fine(cta.mma_reads(kConsumer, kTile, kTileBytes, 1)));
    CHECK(is_fine(cta.mma_reads(kConsumer, kTile, kTileBytes, 2)));
    cta.mmas_done(kConsumer, done ? 2 : 1);
    leave(cta, kConsumer);
    CHECK(is_fine(cta.waited(kProducer, kEmpty)));
    const Races::Conflict conflict = cta.copy_writes(kProducer, kTile, kTileBytes, kFull);
    CHECK(is_fine(conflict) == done);
    if (done) continue;
    CHECK(tells(conflict, "MMAs of warpgroup 1 read"));
    CHECK(conflict.cta == 0 && conflict.warpgroup == 1 && conflict.group == 2);
  }
}

TEST(mmas_and_copies_want_a_fence) {
  for (const bool by_mma : {false, true}) {
    for (const bool fenced : {false, true}) {
      Cta cta;
      CHECK(is_fine(cta.write(kConsumer, kTile, kTileBytes)));
      if (fenced) cta.fence(kConsumer);
      cta.arrive_named(kConsumer, 1);
      cta.end_named(kOther, 1);
      cta.waited_named(kOther, 1);
      CHECK(is_fine(cta.read(kOther, kTile, 4)));  // a thread needs none
      const Races::Conflict conflict = by_mma ? cta.mma_reads(kOther, kTile, kTileBytes, 1)
                                              : cta.copy_reads(kOther, kTile, kTileBytes, 1);
      CHECK(is_fine(conflict) == fenced);
      CHECK(fenced || tells(conflict, "no fence.proxy.async"));
    }
  }
}

TEST(what_is_written_after_a_fence_wants_another) {
  Cta cta;
  CHECK(is_fine(cta.write(kConsumer, kTile, 16)));
  cta.fence(kConsumer);
  CHECK(is_fine(cta.write(kConsumer, {0, 16}, 16)));
  CHECK(is_fine(cta.mma_reads(kConsumer, kTile, 16, 1)));
  CHECK(tells(cta.mma_reads(kConsumer, {0, 16}, 16, 1), "no fence.proxy.async"));
}

TEST(copies_from_shared_memory_are_waited_for) {
  Cta cta;
  CHECK(is_fine(cta.write(kConsumer, kTile, kTileBytes)));
  cta.fence(kConsumer);
  CHECK(is_fine(cta.copy_reads(kConsumer, kTile, kTileBytes, 1)));
  CHECK(tells(cta.write(kConsumer, kTile, 4), "bulk copies of thread 128 read"));
  CHECK(is_fine(cta.copy_reads(kConsumer, {0, 1024}, 16, 1)));
  cta.copies_done(kConsumer, 1);
  CHECK(is_fine(cta.write(kConsumer, {0, 1024}, 4)));
}

TEST(mmas_read_nothing_that_nobody_wrote) {
  Cta cta;
  CHECK(tells(cta.mma_reads(kConsumer, kTile, 16, 1), "nobody wrote"));
}

TEST(mbarriers_are_initialised_first) {
  Races races(1, kThreads, kBytes);
  CHECK(tells(races.arrive(kConsumer, kFull), "nobody has initialised it"));
  CHECK(is_fine(races.init(kProducer, kFull)));
  CHECK(is_fine(races.arrive(kProducer, kFull)));
  CHECK(tells(races.arrive(kConsumer, kFull), "nothing orders"));
  CHECK(tells(races.copy_writes(kProducer, kTile, 16, kFull), "nothing orders"));  // no fence
  races.fence_barriers(kProducer);
  CHECK(is_fine(races.copy_writes(kProducer, kTile, 16, kFull)));
}

// A cluster's barrier, arrived at without a release, publishes mbarriers and nothing else.
TEST(ctas_of_a_cluster_know_of_each_others_mbarriers) {
  Races races(2, kThreads, kBytes);
  const Races::Thread here{0, 0}, there{1, 0};
  const Races::Place barrier{1, 2048}, part{1, 0};
  CHECK(is_fine(races.init(there, barrier)));
  races.fence_barriers(there);
  CHECK(is_fine(races.write(there, part, 4)));
  CHECK(tells(races.copy_writes(here, {1, 64}, 16, barrier), "nothing orders"));
  races.arrive_named(there, Races::kClusterBarrier, true);
  races.end_named(here, Races::kClusterBarrier);
  races.waited_named(here, Races::kClusterBarrier);
  CHECK(is_fine(races.copy_writes(here, {1, 64}, 16, barrier)));
  CHECK(tells(races.copy_writes(here, part, 16, barrier), "wrote over what warp 0 of CTA 1 wrote"));
  races.end_phase(barrier);
  CHECK(tells(races.read(there, {1, 64}, 16), "nothing orders"));
  CHECK(is_fine(races.waited(there, barrier)));
  CHECK(is_fine(races.read(there, {1, 64}, 16)));
}

// Registers of a thread, and an MMA of group 1 under way.
struct OneMma {
  emulator::MmaRegisters registers;
  float sums[4] = {};
  uint32_t operand[4] = {};

  OneMma() {
    CHECK(registers.add(sums, 4, false, 1, "").empty());
    CHECK(registers.read(operand, 1).empty());
  }
};

TEST(registers_of_mmas_are_left_alone) {
  for (const bool waits : {false, true}) {
    OneMma one;
    auto& [registers, sums, operand] = one;
    CHECK(registers.add(sums, 4, true, 2, "").empty());  // MMAs follow each other without a fence
    CHECK(registers.access(operand, false).empty());     // both only read it
    if (waits) registers.done(1);
    CHECK(registers.access(operand, true).empty() == waits);
    CHECK(!registers.access(sums + 3, false).empty());
    CHECK(!registers.access(sums + 3, true).empty());
    if (waits) registers.done(2);
    CHECK(registers.access(sums + 3, false).empty() == waits);
  }
}

TEST(registers_of_mmas_are_fenced) {
  for (const bool fenced : {false, true}) {
    OneMma one;
    auto& [registers, sums, operand] = one;
    registers.done(1);
    CHECK(registers.access(sums, true).empty());
    CHECK(registers.access(operand + 1, true).empty());
    if (fenced) registers.fence();
    CHECK(registers.add(sums, 4, true, 2, "").empty() == fenced);
    CHECK(registers.read(operand, 2).empty() == fenced);
  }
}

// Of MMAs whose operands were overwritten, nobody looks at the sums, before or after.
TEST(sums_of_overwritten_operands_are_not_looked_at) {
  emulator::MmaRegisters registers;
  float sums[4] = {}, others[4] = {};
  CHECK(registers.add(sums, 4, false, 1, "").empty());
  CHECK(registers.add(others, 4, false, 2, "").empty());
  registers.done(2);
  CHECK(registers.access(others, false).empty());
  CHECK(!registers.spoil(1, "overwritten"));
  CHECK(registers.spoil(2, "overwritten"));
  CHECK(emulator::MmaRegisters(registers).access(sums, false) == "overwritten");
  // Begun anew, they may be looked at; that those of group 2 were is remembered.
  registers.fence();
  CHECK(registers.add(sums, 4, false, 3, "").empty());
  CHECK(registers.add(others, 4, false, 3, "").empty());
  registers.done(3);
  CHECK(registers.access(sums, false).empty());
  CHECK(!registers.spoil(1, "overwritten"));
  CHECK(registers.spoil(2, "overwritten"));
}

TEST(sums_of_racing_operands_are_not_looked_at) {
  emulator::MmaRegisters registers;
  float sums[4] = {};
  CHECK(registers.add(sums, 4, false, 1, "a race").empty());
  registers.done(1);
  CHECK(registers.access(sums, false) == "a race");
  CHECK(registers.access(sums, true).empty());  // overwritten, they are the thread's own
  CHECK(registers.access(sums, false).empty());
}
