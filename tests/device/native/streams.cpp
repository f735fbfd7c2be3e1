// Streams, events, and the order that they make.
#include "rehearsal.h"

#include <c10/util/Exception.h>
#include <torch/extension.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <optional>
#include <random>
#include <unordered_map>

namespace rehearsal {

void Clock::join(const Clock& other) {
  if (steps_.size() < other.steps_.size()) steps_.resize(other.steps_.size());
  for (size_t actor = 0; actor < other.steps_.size(); ++actor)
    steps_[actor] = std::max(steps_[actor], other.steps_[actor]);
}

uint64_t Clock::step(int actor) {
  if (static_cast<int>(steps_.size()) <= actor) steps_.resize(actor + 1);
  return ++steps_[actor];
}

namespace {

// Never destroyed: threads of streams outlive main.
struct State {
  std::mutex mutex;  // of clocks and accesses
  Clock host;
  std::mutex making;
  std::vector<std::vector<std::unique_ptr<Queue>>> queues;  // by device; the first of each is its default
  int actors = 1;
  std::vector<std::string> races;
  std::function<std::string()> site;
  std::atomic<uint64_t> seed{0};
  std::atomic<int> longest{0};
};

State& state() {
  static State* const made = new State;
  return *made;
}

thread_local c10::DeviceIndex the_device = 0;
thread_local std::vector<Queue*> the_current;

// A wait of the host lets others run Python.
struct Unlocked {
  Unlocked() {
    if (Py_IsInitialized() && PyGILState_Check()) released.emplace();
  }
  std::optional<pybind11::gil_scoped_release> released;
};

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

c10::DeviceIndex device_count() {
  static const int count = [] {
    const char* given = std::getenv("REHEARSAL_DEVICES");
    return given ? std::atoi(given) : 2;
  }();
  return static_cast<c10::DeviceIndex>(count);
}

c10::DeviceIndex current_device() { return the_device; }

void set_device(c10::DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < device_count(), "there is no device rehearsal:", int(device));
  the_device = device;
}

void delay(uint64_t seed, int microseconds) {
  state().seed = seed;
  state().longest = microseconds;
}

Queue::Queue(c10::DeviceIndex device, c10::StreamId id, int actor) : device(device), id(id), actor(actor) {
  std::thread([this] { run(); }).detach();
}

c10::Stream Queue::stream() const { return c10::Stream(c10::Stream::UNSAFE, c10::Device(KIND, device), id); }

uint64_t Queue::give(std::function<void()> work) {
  std::lock_guard lock(mutex_);
  work_.push_back(std::move(work));
  changed_.notify_all();
  return ++given_;
}

void Queue::run() {
  the_device = device;
  std::mt19937_64 random;
  uint64_t seeded = ~0ull;
  for (;;) {
    std::function<void()> work;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return !work_.empty(); });
      work = std::move(work_.front());
      work_.pop_front();
    }
    if (const int longest = state().longest) {
      if (seeded != state().seed) random.seed((seeded = state().seed) * 1000003 + actor);
      // Most work begins at once, so that some of it falls far behind.
      if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % longest));
    }
    std::string error;
    try {
      work();
    } catch (const std::exception& raised) {
      error = raised.what();
    }
    work = nullptr;
    std::lock_guard lock(mutex_);
    if (error_.empty()) error_ = error;
    ++done_;
    changed_.notify_all();
  }
}

bool Queue::has_done(uint64_t work) {
  std::lock_guard lock(mutex_);
  return done_ >= work;
}

bool Queue::idle() {
  std::lock_guard lock(mutex_);
  return done_ == given_;
}

void Queue::drain() {
  {
    std::lock_guard lock(state().mutex);
    state().host.join(clock);
  }
  const Unlocked unlocked;
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this, last = given_] { return done_ >= last; });
  std::string error;
  std::swap(error, error_);
  TORCH_CHECK(error.empty(), "an operator failed on the device: ", error);
}

Queue& queue_of(const c10::Stream& stream) {
  std::lock_guard lock(state().making);
  auto& queues = state().queues;
  if (queues.empty()) queues.resize(device_count());
  auto& own = queues.at(stream.device_index());
  while (static_cast<c10::StreamId>(own.size()) <= stream.id())
    own.push_back(std::make_unique<Queue>(stream.device_index(), own.size(), state().actors++));
  return *own[stream.id()];
}

Queue& new_queue(c10::DeviceIndex device) {
  c10::StreamId id;
  {
    std::lock_guard lock(state().making);
    auto& queues = state().queues;
    id = queues.empty() || queues.at(device).empty() ? 1 : queues[device].size();
  }
  return queue_of(c10::Stream(c10::Stream::UNSAFE, c10::Device(KIND, device), id));
}

Queue& current_queue(c10::DeviceIndex device) {
  if (device < 0) device = the_device;
  the_current.resize(device_count());
  if (!the_current[device])
    the_current[device] = &queue_of(c10::Stream(c10::Stream::UNSAFE, c10::Device(KIND, device), 0));
  return *the_current[device];
}

void set_current(Queue& queue) {
  the_current.resize(device_count());
  the_current[queue.device] = &queue;
}

void synchronize(c10::DeviceIndex device) {
  if (device < 0) device = the_device;
  std::vector<Queue*> own;
  {
    std::lock_guard lock(state().making);
    if (state().queues.empty()) return;
    for (auto& queue : state().queues.at(device)) own.push_back(queue.get());
  }
  for (auto* queue : own) queue->drain();
}

void Event::record(Queue& queue) {
  uint64_t version;
  {
    std::lock_guard lock(state().mutex);
    clock = queue.clock;
    version = ++given;
  }
  queue.give([own = shared_from_this(), version] {
    std::lock_guard lock(own->mutex);
    own->at = now();
    own->reached = std::max(own->reached, version);
    own->changed.notify_all();
  });
}

void Event::block(Queue& queue) {
  uint64_t version;
  {
    std::lock_guard lock(state().mutex);
    queue.clock.join(clock);
    version = given;
  }
  if (!version) return;
  queue.give([own = shared_from_this(), version] {
    std::unique_lock lock(own->mutex);
    own->changed.wait(lock, [&] { return own->reached >= version; });
  });
}

void Event::wait() {
  uint64_t version;
  {
    std::lock_guard lock(state().mutex);
    state().host.join(clock);
    version = given;
  }
  const Unlocked unlocked;
  std::unique_lock lock(mutex);
  changed.wait(lock, [&] { return reached >= version; });
}

bool Event::query() {
  std::lock_guard order(state().mutex);
  std::lock_guard lock(mutex);
  if (reached < given) return false;
  state().host.join(clock);
  return true;
}

// Accesses.
//
// Each piece of work has the clock of its stream when it was given, which knows what the host knew then. An access races
// with one before it, one of the two being a write, that its clock does not know.

namespace {

struct Access {
  char* begin;
  char* end;
  bool write;
  int actor;
  uint64_t step;
  std::string what;
};

// By block.
std::unordered_map<const void*, std::vector<Access>>& accesses() {
  static auto* const made = new std::unordered_map<const void*, std::vector<Access>>;
  return *made;
}

}  // namespace

void access(
    Queue* queue, const std::string& what, const std::vector<Range>& ranges,
    const std::vector<Queue*>& others) {
  auto& here = state();
  const std::string site = here.site ? here.site() : "";
  const std::string named = what + (site.empty() ? "" : " at " + site);
  std::lock_guard lock(here.mutex);
  Clock& clock = queue ? queue->clock : here.host;
  const int actor = queue ? queue->actor : 0;
  clock.join(here.host);
  const uint64_t step = clock.step(actor);
  Clock before_it = clock;
  for (auto* other : others) before_it.join(other->clock);
  for (const auto& range : ranges) {
    if (range.begin == range.end) continue;
    auto& known = accesses()[range.block];
    std::vector<Access> left;
    for (auto& before : known) {
      const bool apart = before.end <= range.begin || range.end <= before.begin;
      if (!apart && (range.write || before.write) && before.actor != actor &&
          before_it.of(before.actor) < before.step)
        here.races.push_back(named + " does not wait for " + before.what);
      const bool covered = range.begin <= before.begin && before.end <= range.end;
      // What is written over, or read again by the same actor, needs no memory of its own.
      if (!covered || !(range.write || (!before.write && before.actor == actor)))
        left.push_back(std::move(before));
    }
    left.push_back({range.begin, range.end, range.write, actor, step, named});
    known = std::move(left);
  }
}

void forget(const void* block) {
  std::lock_guard lock(state().mutex);
  accesses().erase(block);
}

std::vector<std::string> races() {
  std::lock_guard lock(state().mutex);
  return state().races;
}

void clear_races() {
  std::lock_guard lock(state().mutex);
  state().races.clear();
}

void set_site(std::function<std::string()> site) { state().site = std::move(site); }

}  // namespace rehearsal
