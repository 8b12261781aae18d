// Who has touched which shared memory of a cluster, and who knows of it: finds accesses that
// nothing orders, however the emulator happened to order them.
//
// Every actor counts what it does: a warp, the MMAs of a warpgroup, a thread's bulk copies from
// shared memory, and an mbarrier, which stands for the copies that it counts. A thread knows how
// far each actor has got, because it has waited for it or for somebody who knew. Whoever writes
// must know of all reads and of the write before, and whoever reads of the last write. What the
// generic proxy wrote, TMA and wgmma may only touch if a fence of the proxies came after (PTX ISA,
// "Proxies"). Lanes of a warp are one actor, of races among them nothing is noticed; but each knows
// only what it has waited for itself, until they meet (__syncwarp()).
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace emulator {

class Races {
 public:
  static constexpr int kMostCtas = 2;

  Races(int ctas, int threads, int shared_bytes);

  // A byte of shared memory: of which CTA of the cluster, and where there.
  struct Place {
    int cta, offset;
  };
  // Who does something: a thread of a CTA.
  struct Thread {
    int cta, number;
  };

  // In words, or nothing. Where something was written over that MMAs read, these are of a
  // warpgroup's group of MMAs: it is no error if nobody looks at their sums.
  struct Conflict {
    std::string what;
    int cta = -1, warpgroup = -1;
    uint32_t group = 0;
  };

  Conflict read(Thread, Place, int bytes);
  Conflict write(Thread, Place, int bytes);
  // By an MMA of the warp, in group number `group` (from 1 on) of its warpgroup.
  Conflict mma_reads(Thread, Place, int bytes, uint32_t group);
  // By a bulk copy of the thread's group number `group`, or by one that an mbarrier counts.
  Conflict copy_reads(Thread, Place, int bytes, uint32_t group);
  Conflict copy_reads(Thread, Place, int bytes, Place barrier);
  Conflict copy_writes(Thread, Place, int bytes, Place barrier);

  void fence(Thread);           // fence.proxy.async
  void fence_barriers(Thread);  // fence.mbarrier_init
  void lanes_meet(Thread);      // __syncwarp()
  // The thread has waited for all groups up to this one.
  void mmas_done(Thread, uint32_t group);
  void copies_done(Thread, uint32_t group);

  Conflict init(Thread, Place barrier);
  Conflict arrive(Thread, Place barrier);
  void end_phase(Place barrier);
  Conflict waited(Thread, Place barrier);

  // Named barriers of a CTA, and that of the cluster as kClusterBarrier of CTA 0. `relaxed`: of
  // what was written, mbarriers alone are published (fence_barriers()).
  static constexpr int kClusterBarrier = 16;
  void arrive_named(Thread, int name, bool relaxed = false);
  void end_named(Thread, int name);
  void waited_named(Thread, int name);

 private:
  static constexpr int kWarps = 32, kWarpgroups = kWarps / 4, kCopiers = 32, kBarriers = 96;
  static constexpr int kActorsOfCta = kWarps + kWarpgroups + kCopiers + kBarriers;
  static constexpr int kActors = kMostCtas * kActorsOfCta;
  static constexpr int kReaders = 14;  // of a word since it was written; more are forgotten

  // How far each actor has been seen to get: at all, and by fences of the proxies.
  struct Knowledge {
    std::array<uint32_t, kActors> seen = {}, fenced = {};
    void join(const Knowledge& other);
  };
  struct Barrier {
    int actor;
    uint32_t phases = 0;
    Knowledge arrived, ended;  // of all who have arrived; and by the end of the last phase
  };
  struct Named {
    Knowledge arrived, ended;
  };
  struct Event {
    uint32_t when = 0;  // 0: never
    uint16_t actor = 0;
    bool generic = false;
  };
  struct Word {
    Event written;
    int readers = 0;
    std::array<Event, kReaders> read;
  };

  static int warp(Thread thread) { return thread.cta * kActorsOfCta + thread.number / 32; }
  static int mmas(Thread thread) {
    return thread.cta * kActorsOfCta + kWarps + thread.number / 128;
  }
  int copier(Thread thread);  // the actor that its bulk copies are
  Knowledge& known(Thread thread) { return known_[thread.cta][thread.number]; }
  const Knowledge& known(Thread thread) const { return known_[thread.cta][thread.number]; }
  // Whether a thread knows of what somebody did, and with `fenced` of a fence after it.
  bool knows(Thread thread, const Event& event, bool fenced) const;
  Event now(Thread thread) const;  // what its warp does

  // What the thread knows, its warp's own deeds until now included.
  Knowledge& publish(Thread thread);
  Barrier& barrier(Place place) { return barriers_.at({place.cta, place.offset}); }
  Event of_copies(Place place);  // that the barrier counts in its present phase
  Named& named(Thread thread, int name) {
    return named_[name == kClusterBarrier ? 0 : thread.cta][name];
  }
  Conflict read_as(Thread thread, Place place, int bytes, Event event);
  Conflict write_as(Thread thread, Place place, int bytes, Event event);
  // Whether the thread knows that the barrier is initialised; `fenced`: so that copies may use it.
  Conflict initialised(Thread thread, Place place, bool fenced) const;
  std::string name(const Event& event) const;
  // CTAs of a cluster are threads of the host.
  std::unique_lock<std::mutex> lock() {
    return ctas_ > 1 ? std::unique_lock(mutex_) : std::unique_lock<std::mutex>();
  }

  const int ctas_;
  std::mutex mutex_;
  std::array<std::vector<Knowledge>, kMostCtas> known_;  // by threads
  std::array<std::array<uint32_t, kWarps>, kMostCtas> clocks_;
  std::array<Knowledge, kMostCtas> barriers_fenced_;
  std::array<std::vector<Word>, kMostCtas> words_;
  std::array<std::vector<int>, kMostCtas> copiers_;  // threads, in the order of their first copy
  std::map<std::pair<int, int>, Barrier> barriers_;
  std::array<std::array<Named, kClusterBarrier + 1>, kMostCtas> named_;
};

}  // namespace emulator
