#include "sums.h"

#include <algorithm>

namespace emulator {

void Sums::add(const float* sums, int count, bool adds, uint32_t group, const std::string& wrong) {
  const auto* const memory = reinterpret_cast<const char*>(sums);
  auto array = std::find_if(arrays_.begin(), arrays_.end(),
                            [&](const Array& one) { return one.memory == memory; });
  if (array == arrays_.end()) array = arrays_.insert(array, Array{memory});
  if (!adds) {
    for (const uint32_t one : array->groups) {
      if (one <= array->seen) seen_before_.insert(one);
    }
    *array = {memory};
  }
  array->bytes = count * static_cast<int>(sizeof(float));
  if (array->groups.empty() || array->groups.back() != group) array->groups.push_back(group);
  if (!wrong.empty()) array->wrong = wrong;
}

std::string Sums::access(const void* memory, bool writes) {
  const auto* const byte = static_cast<const char*>(memory);
  for (Array& array : arrays_) {
    if (byte < array.memory || byte >= array.memory + array.bytes) continue;
    std::vector<uint32_t>& groups = array.groups;
    if (writes) {
      // What the thread has not looked at is lost.
      while (!groups.empty() && groups.back() > array.seen) groups.pop_back();
      array.wrong.clear();
    } else if (!groups.empty()) {
      array.seen = groups.back();
    }
    return array.wrong;
  }
  return {};
}

bool Sums::spoil(uint32_t group, const std::string& why) {
  bool looked = seen_before_.count(group) > 0;
  for (Array& array : arrays_) {
    if (!std::binary_search(array.groups.begin(), array.groups.end(), group)) continue;
    looked = looked || group <= array.seen;
    array.wrong = why;
  }
  return looked;
}

}  // namespace emulator
