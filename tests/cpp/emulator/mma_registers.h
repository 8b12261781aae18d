// What a thread does with registers that MMAs use: their sums, and operands that they read. It may
// not touch these before it has waited, nor hand them on to an MMA without a wgmma.fence after it
// has (PTX ISA, "wgmma.fence"). And which sums it has looked at: MMAs may read what is being
// overwritten in shared memory as long as nobody looks at what comes of it.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

namespace emulator {

// Of one thread.
class MmaRegisters {
 public:
  // An MMA of a group adds to `count` sums, or begins them anew. `wrong` is why nobody may look at
  // them, or empty. Returns what else is wrong, or nothing.
  std::string add(const float* sums, int count, bool adds, uint32_t group,
                  const std::string& wrong);
  // It reads four registers. Returns what is wrong, or nothing.
  std::string read(const uint32_t* registers, uint32_t group);
  void fence();               // wgmma.fence
  void done(uint32_t group);  // the thread has waited for all groups up to this one
  // The thread touches memory. Returns why it may not, or nothing.
  std::string access(const void* memory, bool writes);
  // What the MMAs of a group read was overwritten. Returns whether the thread has looked at sums
  // of theirs; it may not from now on.
  bool spoil(uint32_t group, const std::string& why);

 private:
  struct Array {
    const char* memory;
    int bytes = 0;
    bool operand = false;               // MMAs read it
    bool touched = false;               // by the thread, and no wgmma.fence has come since
    std::vector<uint32_t> groups = {};  // that have used it, in order
    uint32_t seen = 0;                  // the last of which the thread has looked at the sums
    std::string wrong = {};
  };
  Array& array_at(const void* memory);

  std::vector<Array> arrays_;
  uint32_t done_ = 0;
  std::set<uint32_t> seen_before_;  // groups of arrays that were begun anew
};

}  // namespace emulator
