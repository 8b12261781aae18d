// What the look for races and for registers of MMAs is told: see races.h and mma_registers.h.
#include "cta.h"
#include "stacks.h"

namespace emulator {

void check(const Races::Conflict& conflict) {
  if (conflict.what.empty()) return;
  if (conflict.cta != cta->rank) fail(conflict.what);
  const int first = 128 * conflict.warpgroup;
  for (int i = first; i < std::min(first + 128, cta->grid.threads); ++i) {
    if (cta->fibers[i].registers.spoil(conflict.group, conflict.what)) fail(conflict.what);
  }
}
Races::Place place_of(uint32_t address) {
  const auto rank = static_cast<int>(address >> 24);
  return {rank ? rank - 1 : cta->rank, static_cast<int>((address & 0xffffff) - kBase)};
}

void fence() {
  if (cta) races().fence(cta->thread());
}
void fence_barriers() {
  if (cta) races().fence_barriers(cta->thread());
}
std::string mma_reads(uint32_t address, int bytes) {
  if (!cta) return {};
  const auto group = static_cast<uint32_t>(cta->warps[cta->current / 32].mmas_begun() + 1);
  return races().mma_reads(cta->thread(), place_of(address), bytes, group).what;
}
void mma_registers(int lane, const uint32_t* operand, const float* sums, int count, bool adds,
                   const std::string& wrong) {
  if (!cta) return;
  const int warp = cta->current / 32;
  const auto group = static_cast<uint32_t>(cta->warps[warp].mmas_begun() + 1);
  MmaRegisters& own = cta->fibers[32 * warp + lane].registers;
  std::string what = own.add(sums, count, adds, group, wrong);
  if (operand && what.empty()) what = own.read(operand, group);
  if (!what.empty()) fail(what);
}
void mma_fence() {
  if (cta) cta->fibers[cta->current].registers.fence();
}
void copy_reads(uint32_t address, int bytes) {
  const uint32_t group = cta->fibers[cta->current].groups_begun + 1;
  check(races().copy_reads(cta->thread(), place_of(address), bytes, group));
}
void copy_reads(uint32_t address, int bytes, uint32_t barrier) {
  check(races().copy_reads(cta->thread(), place_of(address), bytes, place_of(barrier)));
}
void copy_writes(uint32_t address, int bytes, uint32_t barrier) {
  check(races().copy_writes(cta->thread(), place_of(address), bytes, place_of(barrier)));
}

namespace {

// Of the CTA's shared memory, or of that of another CTA of the cluster.
bool accessed_shared(const Cta& owner, const char* byte, int bytes, bool writes) {
  const char* const first = owner.shared.load(std::memory_order_relaxed);
  const auto offset = static_cast<size_t>(byte - first);
  if (!first || offset >= static_cast<size_t>(owner.grid.shared_bytes)) return false;
  const Races::Place place{owner.rank, static_cast<int>(offset)};
  if (writes) {
    check(races().write(cta->thread(), place, bytes));
  } else {
    check(races().read(cta->thread(), place, bytes));
  }
  return true;
}

}  // namespace

void accessed(const void* memory, int bytes, bool writes) {
  Cta* const own = cta;
  if (!own || own->asynchronous) return;
  const auto* const byte = static_cast<const char*>(memory);
  Fiber& fiber = own->fibers[own->current];
  if (static_cast<size_t>(byte - fiber.stack) < kStackBytes) {
    const std::string wrong = fiber.registers.access(byte, writes);
    if (!wrong.empty()) fail(wrong);
    return;
  }
  if (accessed_shared(*own, byte, bytes, writes) || own->grid.cluster == 1) return;
  for (const auto& other : own->cluster->ctas) {
    const Cta* const owner = other.load();
    if (owner && owner != own) accessed_shared(*owner, byte, bytes, writes);
  }
}

}  // namespace emulator
