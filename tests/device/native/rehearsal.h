// A device to rehearse on: memory that the host cannot touch, streams that are threads, and a detector of races.
//
// Every tensor of the device lies in an arena that is mapped twice: at the address that tensors show, where any access
// faults, and at an alias, where the threads of streams read and write. An operator is launched: its CPU kernel is
// queued on the current stream with the aliases of its arguments, whose addresses are taken at the launch.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace rehearsal {

constexpr auto KIND = c10::DeviceType::PrivateUse1;

// What is known to come before: for each actor the number of its steps. Actor 0 is the host, the others are streams.
class Clock {
 public:
  void join(const Clock& other);
  uint64_t step(int actor);
  uint64_t of(int actor) const {
    return actor < static_cast<int>(steps_.size()) ? steps_[actor] : 0;
  }

 private:
  std::vector<uint64_t> steps_;
};

struct Event;

// A stream: work is done in order, by a thread of its own, some time after it was given.
class Queue {
 public:
  Queue(c10::DeviceIndex device, c10::StreamId id, int actor);
  uint64_t give(std::function<void()> work);  // the number of the work
  void drain();                               // the host waits; raises what went wrong
  bool idle();
  bool has_done(uint64_t work);
  c10::Stream stream() const;

  const c10::DeviceIndex device;
  const c10::StreamId id;
  const int actor;
  Clock clock;  // of the work that was given last

 private:
  void run();
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  uint64_t given_ = 0, done_ = 0;
  std::string error_;
};

// Work that is queued for an event keeps it.
struct Event : std::enable_shared_from_this<Event> {
  void record(Queue& queue);
  void block(Queue& queue);
  void wait();  // the host
  bool query();

  double at = 0;  // seconds
  uint64_t given = 0, reached = 0;
  Clock clock;
  std::mutex mutex;
  std::condition_variable changed;
};

c10::DeviceIndex device_count();
c10::DeviceIndex current_device();
void set_device(c10::DeviceIndex device);
Queue& queue_of(const c10::Stream& stream);
Queue& current_queue(c10::DeviceIndex device);
Queue& new_queue(c10::DeviceIndex device);
void set_current(Queue& queue);
void synchronize(c10::DeviceIndex device);
void delay(uint64_t seed, int microseconds);  // at most, before each piece of work; 0: none

// Bytes of a block that an operator reads or writes: from the first element of a tensor to its last one.
struct Range {
  const void* block;
  char* begin;
  char* end;
  bool write;
};

// Note accesses of the work that is given next to a queue (null: of the host), and whether they come after those they
// have to, where what others were given so far comes before, too.
void access(
    Queue* queue, const std::string& what, const std::vector<Range>& ranges,
    const std::vector<Queue*>& others = {});
void forget(const void* block);  // its accesses: it is another one now
std::vector<std::string> races();
void clear_races();
void set_site(std::function<std::string()> site);

c10::Allocator* allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* data);
void used_by(const void* pinned, Queue& queue, uint64_t work);  // pinned memory, until this work is done
void record_stream(const c10::DataPtr& data, Queue& queue);
void free_cache(c10::DeviceIndex device);
char* alias(const void* data);
struct Memory {
  size_t allocated, peak, reserved, peak_reserved, total, largest;  // largest: that could be had now
};
Memory memory(c10::DeviceIndex device);
void reset_peak(c10::DeviceIndex device);
void limit(c10::DeviceIndex device, size_t bytes);

}  // namespace rehearsal
