// Which sums of MMAs a thread has looked at: MMAs may read what is being overwritten as long as
// nobody looks at what comes of it.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

namespace emulator {

// Of one thread.
class Sums {
 public:
  // An MMA of a group adds to `count` sums, or begins them anew. `wrong` is why nobody may look at
  // them, or empty.
  void add(const float* sums, int count, bool adds, uint32_t group, const std::string& wrong);
  // The thread touches memory. Returns why it may not look at that, or nothing.
  std::string access(const void* memory, bool writes);
  // What the MMAs of a group read was overwritten. Returns whether the thread has looked at sums
  // of theirs; it may not from now on.
  bool spoil(uint32_t group, const std::string& why);

 private:
  struct Array {
    const char* memory;
    int bytes = 0;
    std::vector<uint32_t> groups = {};  // that have added to it, in order
    uint32_t seen = 0;                  // the last of which the thread has looked at the sums
    std::string wrong = {};
  };
  std::vector<Array> arrays_;
  std::set<uint32_t> seen_before_;  // groups of arrays that were begun anew
};

}  // namespace emulator
