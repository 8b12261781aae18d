#include "races.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace emulator {
namespace {

constexpr int kWordBytes = 4;
constexpr char kNothing[] = "nothing orders the two";
constexpr char kNoFence[] = "no fence.proxy.async came between";

[[noreturn]] void give_up(const char* what) {
  std::fprintf(stderr, "emulator: %s are not provided for\n", what);
  std::abort();
}

}  // namespace

Races::Races(int ctas, int threads, int shared_bytes) : ctas_(ctas) {
  if (ctas > kMostCtas || threads > 32 * kWarps) give_up("such large CTAs or clusters");
  for (int cta = 0; cta < ctas; ++cta) {
    known_[cta].resize(threads);
    clocks_[cta].fill(1);
    words_[cta].resize((shared_bytes + kWordBytes - 1) / kWordBytes);
  }
}

void Races::Knowledge::join(const Knowledge& other) {
  for (int i = 0; i < kActors; ++i) seen[i] = std::max(seen[i], other.seen[i]);
  for (int i = 0; i < kActors; ++i) fenced[i] = std::max(fenced[i], other.fenced[i]);
}

bool Races::knows(Thread thread, const Event& event, bool fenced) const {
  if (event.actor == warp(thread) && !fenced) return true;
  const Knowledge& k = known(thread);
  return event.when <= (fenced ? k.fenced : k.seen)[event.actor];
}
Races::Event Races::now(Thread thread) const {
  return {clocks_[thread.cta][thread.number / 32], static_cast<uint16_t>(warp(thread)), true};
}
Races::Knowledge& Races::publish(Thread thread) {
  Knowledge& k = known(thread);
  k.seen[warp(thread)] = clocks_[thread.cta][thread.number / 32]++;
  return k;
}

int Races::copier(Thread thread) {
  std::vector<int>& all = copiers_[thread.cta];
  const auto at = std::find(all.begin(), all.end(), thread.number);
  const auto index = static_cast<int>(at - all.begin());
  if (at == all.end()) all.push_back(thread.number);
  if (index >= kCopiers) give_up("so many threads that copy in bulk");
  return thread.cta * kActorsOfCta + kWarps + kWarpgroups + index;
}

std::string Races::name(const Event& event) const {
  const int owner = event.actor / kActorsOfCta;
  int index = event.actor % kActorsOfCta;
  const auto numbered = [&](const char* what, int number) {
    return what + std::to_string(number) + (ctas_ > 1 ? " of CTA " + std::to_string(owner) : "");
  };
  if (index < kWarps) return numbered("warp ", index);
  index -= kWarps;
  if (index < kWarpgroups) return numbered("MMAs of warpgroup ", index);
  index -= kWarpgroups;
  if (index < kCopiers) return numbered("bulk copies of thread ", copiers_[owner][index]);
  const auto at = std::find_if(barriers_.begin(), barriers_.end(),
                               [&](const auto& b) { return b.second.actor == event.actor; });
  return numbered("copies counted by the mbarrier at ", at->first.second);
}

Races::Conflict Races::read_as(Thread thread, Place place, int bytes, Event event) {
  const bool by_mma = !event.generic && event.actor == mmas(thread);
  const int last = (place.offset + bytes - 1) / kWordBytes;
  for (int i = place.offset / kWordBytes; i <= last; ++i) {
    Word& word = words_[place.cta][i];
    const Event& w = word.written;
    // (Copies may take along what lies beyond a tensor's end.)
    if (by_mma && w.when == 0) return {name(event) + " read what nobody wrote"};
    if (!knows(thread, w, w.generic && !event.generic)) {
      return {name(event) + " read what " + name(w) + " wrote at " +
              std::to_string(i * kWordBytes) + " of shared memory, and " +
              (knows(thread, w, false) ? kNoFence : kNothing)};
    }
    Event* const end = word.read.data() + word.readers;
    Event* own =
        std::find_if(word.read.data(), end, [&](const Event& e) { return e.actor == event.actor; });
    if (own == end && word.readers < kReaders) {
      ++word.readers;
    } else if (own == end) {
      std::rotate(word.read.begin(), word.read.begin() + 1, word.read.end());
      own = &word.read.back();
    }
    *own = event;
  }
  return {};
}

Races::Conflict Races::write_as(Thread thread, Place place, int bytes, Event event) {
  Conflict conflict;
  const auto note = [&](int word, const Event& other, const char* did, const char* why) {
    if (!conflict.what.empty()) return;
    conflict.what = name(event) + " wrote over what " + name(other) + did + " at " +
                    std::to_string(word * kWordBytes) + " of shared memory, and " + why;
    const int warpgroup = other.actor % kActorsOfCta - kWarps;
    if (warpgroup >= 0 && warpgroup < kWarpgroups) {
      conflict.cta = other.actor / kActorsOfCta;
      conflict.warpgroup = warpgroup;
      conflict.group = other.when;
    }
  };
  const int last = (place.offset + bytes - 1) / kWordBytes;
  for (int i = place.offset / kWordBytes; i <= last; ++i) {
    Word& word = words_[place.cta][i];
    for (int r = 0; r < word.readers; ++r) {
      const Event& e = word.read[r];
      if (!knows(thread, e, false)) note(i, e, " read", kNothing);
    }
    const Event& w = word.written;
    if (!knows(thread, w, w.generic && !event.generic)) {
      note(i, w, " wrote", knows(thread, w, false) ? kNoFence : kNothing);
    }
    word.written = event;
    word.readers = 0;
  }
  return conflict;
}

Races::Conflict Races::read(Thread thread, Place place, int bytes) {
  const auto guard = lock();
  return read_as(thread, place, bytes, now(thread));
}
Races::Conflict Races::write(Thread thread, Place place, int bytes) {
  const auto guard = lock();
  return write_as(thread, place, bytes, now(thread));
}
Races::Conflict Races::mma_reads(Thread thread, Place place, int bytes, uint32_t group) {
  const auto guard = lock();
  return read_as(thread, place, bytes, {group, static_cast<uint16_t>(mmas(thread)), false});
}
Races::Conflict Races::copy_reads(Thread thread, Place place, int bytes, uint32_t group) {
  const auto guard = lock();
  return read_as(thread, place, bytes, {group, static_cast<uint16_t>(copier(thread)), false});
}
Races::Event Races::of_copies(Place place) {
  const Barrier& b = barrier(place);
  return {b.phases + 1, static_cast<uint16_t>(b.actor), false};
}
Races::Conflict Races::copy_reads(Thread thread, Place place, int bytes, Place counted_by) {
  const auto guard = lock();
  const Conflict conflict = initialised(thread, counted_by, true);
  if (!conflict.what.empty()) return conflict;
  return read_as(thread, place, bytes, of_copies(counted_by));
}
Races::Conflict Races::copy_writes(Thread thread, Place place, int bytes, Place counted_by) {
  const auto guard = lock();
  const Conflict conflict = initialised(thread, counted_by, true);
  if (!conflict.what.empty()) return conflict;
  return write_as(thread, place, bytes, of_copies(counted_by));
}

void Races::fence(Thread thread) {
  const auto guard = lock();
  Knowledge& k = publish(thread);
  k.fenced = k.seen;
}
void Races::fence_barriers(Thread thread) {
  fence(thread);
  const auto guard = lock();
  barriers_fenced_[thread.cta].join(known(thread));
}
void Races::lanes_meet(Thread thread) {
  const auto guard = lock();
  std::vector<Knowledge>& all = known_[thread.cta];
  const size_t first = thread.number / 32 * 32, end = std::min(first + 32, all.size());
  for (size_t i = first + 1; i < end; ++i) all[first].join(all[i]);
  for (size_t i = first + 1; i < end; ++i) all[i] = all[first];
}
void Races::mmas_done(Thread thread, uint32_t group) {
  const auto guard = lock();
  uint32_t& seen = known(thread).seen[mmas(thread)];
  seen = std::max(seen, group);
}
void Races::copies_done(Thread thread, uint32_t group) {
  const auto guard = lock();
  const std::vector<int>& all = copiers_[thread.cta];
  if (std::find(all.begin(), all.end(), thread.number) == all.end()) return;
  uint32_t& seen = known(thread).seen[copier(thread)];
  seen = std::max(seen, group);
}

Races::Conflict Races::init(Thread thread, Place place) {
  const auto guard = lock();
  const auto count = std::count_if(barriers_.begin(), barriers_.end(),
                                   [&](const auto& b) { return b.first.first == place.cta; });
  if (count >= kBarriers) give_up("so many mbarriers");
  const int actor = place.cta * kActorsOfCta + kWarps + kWarpgroups + kCopiers;
  barriers_.try_emplace({place.cta, place.offset}, Barrier{actor + static_cast<int>(count)});
  return write_as(thread, place, 8, now(thread));
}
Races::Conflict Races::initialised(Thread thread, Place place, bool fenced) const {
  const auto used = [&](const std::string& wrong) -> Conflict {
    return {name(now(thread)) + " used the mbarrier at " + std::to_string(place.offset) + ", and " +
            wrong};
  };
  if (!barriers_.count({place.cta, place.offset})) return used("nobody has initialised it");
  const Event& w = words_[place.cta][place.offset / kWordBytes].written;
  if (knows(thread, w, fenced)) return {};
  return used("nothing orders that after " + name(w) + " initialised it");
}
Races::Conflict Races::arrive(Thread thread, Place place) {
  const auto guard = lock();
  const Conflict conflict = initialised(thread, place, false);
  if (conflict.what.empty()) barrier(place).arrived.join(publish(thread));
  return conflict;
}
void Races::end_phase(Place place) {
  const auto guard = lock();
  Barrier& b = barrier(place);
  b.ended = b.arrived;
  b.ended.seen[b.actor] = ++b.phases;
}
Races::Conflict Races::waited(Thread thread, Place place) {
  const auto guard = lock();
  const Conflict conflict = initialised(thread, place, false);
  if (conflict.what.empty()) known(thread).join(barrier(place).ended);
  return conflict;
}

void Races::arrive_named(Thread thread, int name, bool relaxed) {
  const auto guard = lock();
  named(thread, name).arrived.join(relaxed ? barriers_fenced_[thread.cta] : publish(thread));
}
void Races::end_named(Thread thread, int name) {
  const auto guard = lock();
  named(thread, name).ended = named(thread, name).arrived;
}
void Races::waited_named(Thread thread, int name) {
  const auto guard = lock();
  known(thread).join(named(thread, name).ended);
}

}  // namespace emulator
