// Memory: the arena of each device, a caching allocator whose blocks come back in the order of their stream, and pinned
// memory of the host.
#include "rehearsal.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <set>

namespace rehearsal {
namespace {

constexpr size_t UNIT = 512;
constexpr int POISON = 0xff;  // NaN in every format of floating point

struct Block {
  char* at;
  size_t size;
  size_t used;  // of it, by who has it
  Queue* queue;
  c10::DeviceIndex device;
  std::set<Queue*> others;                        // streams that it was recorded on
  std::vector<std::pair<Queue*, uint64_t>> left;  // what they had to do when it was given back
};

struct Arena {
  char *base = nullptr, *alias = nullptr;
  size_t size = 0, limit = 0;
  std::map<char*, size_t> free;  // by address, coalesced
  std::map<Queue*, std::multimap<size_t, Block*>> cached;
  std::vector<Block*> waiting;  // given back, and recorded on streams that are not done
  size_t allocated = 0, peak = 0, reserved = 0, peak_reserved = 0;

  void open() {
    if (base) return;
    const char* given = std::getenv("REHEARSAL_BYTES");
    size = limit = given ? std::strtoull(given, nullptr, 10) : size_t(4) << 30;
    const int file = memfd_create("rehearsal", 0);
    TORCH_CHECK(file >= 0 && ftruncate(file, size) == 0, "no memory for the rehearsal device");
    base = static_cast<char*>(mmap(nullptr, size, PROT_NONE, MAP_SHARED, file, 0));
    alias = static_cast<char*>(mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
    TORCH_CHECK(base != MAP_FAILED && alias != MAP_FAILED, "no addresses for the rehearsal device");
    close(file);
    free[base] = size;
  }

  void put_back(char* at, size_t bytes) {
    auto next = free.upper_bound(at);
    if (next != free.end() && at + bytes == next->first) {
      bytes += next->second;
      next = free.erase(next);
    }
    if (next != free.begin()) {
      auto before = std::prev(next);
      if (before->first + before->second == at) {
        before->second += bytes;
        return;
      }
    }
    free[at] = bytes;
  }

  char* carve(size_t bytes) {
    if (reserved + bytes > limit) return nullptr;
    for (auto& [at, room] : free) {
      if (room < bytes) continue;
      char* const found = at;
      const size_t left = room - bytes;
      free.erase(found);
      if (left) free[found + bytes] = left;
      reserved += bytes;
      peak_reserved = std::max(peak_reserved, reserved);
      return found;
    }
    return nullptr;
  }
};

std::mutex& mutex() {
  static auto* const made = new std::mutex;
  return *made;
}

Arena& arena(c10::DeviceIndex device) {
  static auto* const made = new std::vector<Arena>(device_count());
  made->at(device).open();
  return (*made)[device];
}

void poison(Block* block) {
  block->queue->give([at = alias(block->at), size = block->size] { std::memset(at, POISON, size); });
}

// Blocks whose other streams are done go to the cache. The stream of the block does not wait for them: nobody has it.
void collect(Arena& own) {
  std::vector<Block*> left;
  for (auto* block : own.waiting) {
    bool done = true;
    for (auto& [queue, work] : block->left) done = done && queue->has_done(work);
    if (!done) {
      left.push_back(block);
      continue;
    }
    block->others.clear();
    block->left.clear();
    poison(block);
    own.cached[block->queue].emplace(block->size, block);
  }
  own.waiting = std::move(left);
}

// Cached blocks are free again. Their streams are done.
void release(Arena& own) {
  collect(own);
  for (auto& [queue, blocks] : own.cached) {
    for (auto& [size, block] : blocks) {
      own.put_back(block->at, size);
      own.reserved -= size;
      delete block;
    }
  }
  own.cached.clear();
}

void give_back(void* context) {
  auto* block = static_cast<Block*>(context);
  const std::vector<Range> whole{{block->at, block->at, block->at + block->size, true}};
  access(block->queue, "memory that is given back", whole, {block->others.begin(), block->others.end()});
  for (auto* queue : block->others) block->left.emplace_back(queue, queue->give([] {}));
  std::lock_guard lock(mutex());
  auto& own = arena(block->device);
  own.allocated -= block->used;
  if (!block->others.empty()) {
    own.waiting.push_back(block);
    return;
  }
  poison(block);
  own.cached[block->queue].emplace(block->size, block);
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const auto device = current_device();
    const c10::Device where(KIND, device);
    if (!bytes) return {nullptr, nullptr, &give_back_nothing, where};
    auto& queue = current_queue(device);
    Block* block = get(queue, device, (bytes + UNIT - 1) / UNIT * UNIT);
    return {block->at, block, &give_back, where};
  }

  static void give_back_nothing(void*) {}

  Block* get(Queue& queue, c10::DeviceIndex device, size_t bytes) {
    Block* block = cached(queue, device, bytes);
    if (!block) {
      synchronize(device);
      std::lock_guard lock(mutex());
      release(arena(device));
      block = carved(queue, device, bytes);
    }
    if (!block) {
      const auto held = memory(device);
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "rehearsal out of memory. Tried to allocate ", bytes, " bytes; of ",
          held.total, " are allocated ", held.allocated, ", and the largest free block is ", held.largest);
    }
    forget(block->at);
    return block;
  }

  Block* cached(Queue& queue, c10::DeviceIndex device, size_t bytes) {
    std::lock_guard lock(mutex());
    auto& own = arena(device);
    collect(own);
    auto& blocks = own.cached[&queue];
    auto found = blocks.lower_bound(bytes);
    if (found == blocks.end() || found->first > bytes + bytes / 4) return carved(queue, device, bytes);
    auto* block = found->second;
    blocks.erase(found);
    took(own, block, bytes);
    return block;
  }

  Block* carved(Queue& queue, c10::DeviceIndex device, size_t bytes) {
    auto& own = arena(device);
    char* at = own.carve(bytes);
    if (!at) return nullptr;
    auto* block = new Block{at, bytes, bytes, &queue, device, {}, {}};
    poison(block);
    took(own, block, bytes);
    return block;
  }

  static void took(Arena& own, Block* block, size_t bytes) {
    block->used = bytes;
    own.allocated += bytes;
    own.peak = std::max(own.peak, own.allocated);
  }

  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }

  void copy_data(void* target, const void* source, size_t bytes) const override {
    auto& queue = current_queue(-1);
    queue.give([to = alias(target), from = alias(source), bytes] { std::memcpy(to, from, bytes); });
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { free_cache(current_device()); }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    record_stream(data, queue_of(stream));
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats found;
    const auto held = memory(device);
    found.allocated_bytes[0].current = held.allocated;
    found.allocated_bytes[0].peak = held.peak;
    found.reserved_bytes[0].current = held.reserved;
    found.reserved_bytes[0].peak = held.peak_reserved;
    return found;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { reset_peak(device); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const auto held = memory(device);
    return {held.total - held.reserved, held.total};
  }
};

// Pinned memory: given back when the copies that use it are done.
struct Pinned {
  size_t size;
  std::vector<std::pair<Queue*, uint64_t>> uses;
};

std::map<char*, Pinned>& pinned() {
  static auto* const made = new std::map<char*, Pinned>;
  return *made;
}

void unpin(void* at) {
  std::vector<std::pair<Queue*, uint64_t>> uses;
  size_t size;
  {
    std::lock_guard lock(mutex());
    auto found = pinned().find(static_cast<char*>(at));
    uses = found->second.uses;
    size = found->second.size;
    pinned().erase(found);
  }
  const auto done = [&] {
    for (auto& [queue, work] : uses)
      if (!queue->has_done(work)) return false;
    return true;
  };
  while (!done()) std::this_thread::yield();
  std::memset(at, POISON, size);
  std::free(at);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* at = nullptr;
    TORCH_CHECK(posix_memalign(&at, 64, std::max<size_t>(bytes, 1)) == 0, "no memory to pin");
    std::memset(at, POISON, bytes);
    std::lock_guard lock(mutex());
    pinned()[static_cast<char*>(at)] = {bytes, {}};
    return {at, at, &unpin, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    std::memcpy(target, source, bytes);
  }
};

Pinned* pinned_at(const void* data) {
  auto* at = static_cast<char*>(const_cast<void*>(data));
  auto found = pinned().upper_bound(at);
  if (found == pinned().begin()) return nullptr;
  --found;
  return at < found->first + std::max<size_t>(found->second.size, 1) ? &found->second : nullptr;
}

Allocator the_allocator;
PinnedAllocator the_pinned;

}  // namespace

c10::Allocator* allocator() { return &the_allocator; }
c10::Allocator* pinned_allocator() { return &the_pinned; }

bool is_pinned(const void* data) {
  std::lock_guard lock(mutex());
  return pinned_at(data) != nullptr;
}

void used_by(const void* data, Queue& queue, uint64_t work) {
  std::lock_guard lock(mutex());
  if (auto* found = pinned_at(data)) found->uses.emplace_back(&queue, work);
}

void record_stream(const c10::DataPtr& data, Queue& queue) {
  if (data.get_deleter() != &give_back) return;
  auto* block = static_cast<Block*>(data.get_context());
  if (&queue == block->queue) return;
  std::lock_guard lock(mutex());
  block->others.insert(&queue);
}

void free_cache(c10::DeviceIndex device) {
  synchronize(device);
  std::lock_guard lock(mutex());
  release(arena(device));
}

char* alias(const void* data) {
  auto* at = static_cast<char*>(const_cast<void*>(data));
  if (!at) return nullptr;
  for (c10::DeviceIndex device = 0; device < device_count(); ++device) {
    auto& own = arena(device);
    if (own.base <= at && at < own.base + own.size) return own.alias + (at - own.base);
  }
  TORCH_CHECK(false, "this address is not of the rehearsal device");
}

Memory memory(c10::DeviceIndex device) {
  std::lock_guard lock(mutex());
  auto& own = arena(device < 0 ? current_device() : device);
  size_t largest = 0;
  for (auto& [at, room] : own.free) largest = std::max(largest, room);
  largest = std::min(largest, own.limit - std::min(own.limit, own.reserved));
  return {own.allocated, own.peak, own.reserved, own.peak_reserved, own.limit, largest};
}

void reset_peak(c10::DeviceIndex device) {
  std::lock_guard lock(mutex());
  auto& own = arena(device < 0 ? current_device() : device);
  own.peak = own.allocated;
  own.peak_reserved = own.reserved;
}

void limit(c10::DeviceIndex device, size_t bytes) {
  std::lock_guard lock(mutex());
  auto& own = arena(device);
  TORCH_CHECK(bytes <= own.size, "the arena has ", own.size, " bytes");
  own.limit = bytes;
}

}  // namespace rehearsal
