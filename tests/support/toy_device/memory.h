// Streams and memory of the toy device.

#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <vector>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
using c10::StreamId;

constexpr auto TOY = c10::DeviceType::PrivateUse1;
constexpr int UNWRITTEN = 0xFF; // every byte so: NaN in each floating-point format
constexpr size_t ALIGNMENT = 64;

size_t number_from(const char* variable, size_t otherwise) {
  const char* text = std::getenv(variable);
  return text ? std::strtoull(text, nullptr, 10) : otherwise;
}

const DeviceIndex COUNT = static_cast<DeviceIndex>(number_from("TOY_DEVICE_COUNT", 2));
const size_t MEMORY = number_from("TOY_DEVICE_MEMORY", size_t(1) << 30);

// One lock for memory and streams. Nothing that is done under it needs the interpreter's.
std::recursive_mutex lock;
using Locked = std::lock_guard<std::recursive_mutex>;

thread_local DeviceIndex current_device = 0;
thread_local std::map<DeviceIndex, StreamId> current_streams;

void check_index(int64_t index) {
  TORCH_CHECK(index >= 0 && index < COUNT, "There is no device toy:", index, ": the toy devices are ", int(COUNT));
}

// --- streams -----------------------------------------------------------------------------------------------------

using StreamKey = std::pair<DeviceIndex, StreamId>;

struct Task {
  std::function<void()> run;
  const char* target = nullptr;
  const char* source = nullptr;
};

struct Queue {
  std::deque<Task> waiting;
  uint64_t queued = 0, done = 0;
};

std::map<StreamKey, Queue> queues;
StreamId num_streams = 0;

StreamKey current_stream(DeviceIndex device) {
  return {device, current_streams[device]};
}

void enqueue(StreamKey stream, Task task) {
  Locked locked(lock);
  queues[stream].waiting.push_back(std::move(task));
  ++queues[stream].queued;
}

void run_until(StreamKey stream, uint64_t number) {
  Locked locked(lock);
  auto& queue = queues[stream];
  while (queue.done < number) {
    Task task = std::move(queue.waiting.front());
    queue.waiting.pop_front();
    ++queue.done;
    task.run();
  }
}

void run_all(StreamKey stream) {
  Locked locked(lock);
  run_until(stream, queues[stream].queued);
}

void run_device(DeviceIndex device) {
  Locked locked(lock);
  for (auto& [stream, queue] : queues)
    if (stream.first == device)
      run_until(stream, queue.queued);
}

struct ToyEvent {
  StreamKey stream;
  uint64_t number;
  std::chrono::steady_clock::time_point time;
};

StreamKey key_of(const Stream& stream) {
  return {stream.device_index(), stream.id()};
}

struct ToyGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TOY; }
  Device getDevice() const override { return Device(TOY, current_device); }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = device.index(); }
  void setDevice(Device device) const override {
    check_index(device.index());
    current_device = device.index();
  }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return COUNT; }

  DeviceIndex index_of(Device device) const { return device.has_index() ? device.index() : current_device; }
  Stream stream(DeviceIndex device, StreamId id) const { return Stream(Stream::UNSAFE, Device(TOY, device), id); }
  Stream getStream(Device device) const override {
    return stream(index_of(device), current_streams[index_of(device)]);
  }
  Stream getDefaultStream(Device device) const override { return stream(index_of(device), 0); }
  Stream getNewStream(Device device, int) const override {
    Locked locked(lock);
    return stream(index_of(device), ++num_streams);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream next) const override {
    Stream before = getStream(next.device());
    current_streams[next.device_index()] = next.id();
    return before;
  }
  void* getStreamNativeHandle(const Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  bool queryStream(const Stream& stream) const override {
    // It was not done yet, and is next time: who asks in a loop gets on.
    Locked locked(lock);
    bool is_done = queues[key_of(stream)].waiting.empty();
    run_all(key_of(stream));
    return is_done;
  }
  void synchronizeStream(const Stream& stream) const override { run_all(key_of(stream)); }
  void synchronizeDevice(const DeviceIndex device) const override { run_device(device < 0 ? current_device : device); }

  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    Locked locked(lock);
    delete static_cast<ToyEvent*>(*event);
    *event = new ToyEvent{key_of(stream), queues[key_of(stream)].queued, std::chrono::steady_clock::now()};
  }
  void block(void* event, const Stream& stream) const override {
    if (event == nullptr)
      return;
    auto recorded = *static_cast<ToyEvent*>(event);
    enqueue(key_of(stream), {[recorded] { run_until(recorded.stream, recorded.number); }});
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr)
      return true;
    Locked locked(lock);
    auto* recorded = static_cast<ToyEvent*>(event);
    bool is_done = queues[recorded->stream].done >= recorded->number;
    run_until(recorded->stream, recorded->number);
    return is_done;
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr)
      run_until(static_cast<ToyEvent*>(event)->stream, static_cast<ToyEvent*>(event)->number);
  }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    auto passed = static_cast<ToyEvent*>(second)->time - static_cast<ToyEvent*>(first)->time;
    return std::chrono::duration<double, std::milli>(passed).count();
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<ToyEvent*>(event); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override;
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, ToyGuard)

// --- memory ------------------------------------------------------------------------------------------------------

struct Block {
  size_t size;
  DeviceIndex device; // -1: pinned memory of the host
  StreamKey stream;
  std::set<StreamKey> users;
};

struct DeviceMemory {
  size_t limit = MEMORY;
  std::multimap<size_t, char*> cache;
  c10::CachingDeviceAllocator::DeviceStats stats;

  auto& allocated() { return stats.allocated_bytes[0]; }
  auto& reserved() { return stats.reserved_bytes[0]; }
};

std::map<const char*, Block> blocks;
std::vector<DeviceMemory> memories(COUNT);

char* allocate_host(size_t size) {
  void* memory = nullptr;
  TORCH_CHECK(posix_memalign(&memory, ALIGNMENT, size) == 0, "The host has no memory left for ", size, " bytes");
  return static_cast<char*>(memory);
}

// Do what is queued with a block that is freed. What a stream that the block does not know of still wanted is gone.
void settle(const char* memory, const Block& block) {
  if (block.device >= 0)
    run_all(block.stream);
  for (auto& [stream, queue] : queues) {
    bool is_used = false;
    for (auto& task : queue.waiting)
      for (const char* place : {task.target, task.source})
        is_used = is_used || (place >= memory && place < memory + block.size);
    if (!is_used)
      continue;
    if (block.device >= 0 && stream != block.stream && !block.users.count(stream))
      std::memset(const_cast<char*>(memory), UNWRITTEN, block.size);
    run_until(stream, queue.queued);
  }
}

void empty_cache(DeviceMemory& memory) {
  for (auto& [size, block] : memory.cache) {
    std::free(block);
    memory.reserved().decrease(size);
  }
  memory.cache.clear();
}

// Tell torch's profiler of memory that was taken or, with a negative size, given back.
void report(void* data, DeviceIndex device, int64_t size) {
  auto& memory = memories[device];
  c10::reportMemoryUsageToProfiler(data, size, memory.allocated().current, memory.reserved().current, Device(TOY, device));
}

void release(void* context) {
  Locked locked(lock);
  auto found = blocks.find(static_cast<const char*>(context));
  Block block = found->second;
  settle(found->first, block);
  blocks.erase(found);
  if (block.device < 0) {
    std::free(context);
    return;
  }
  auto& memory = memories[block.device];
  memory.allocated().decrease(block.size);
  memory.stats.allocation[0].decrease(1);
  report(context, block.device, -static_cast<int64_t>(block.size));
  memory.cache.emplace(block.size, static_cast<char*>(context));
}

struct ToyAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    Locked locked(lock);
    DeviceIndex device = current_device;
    if (size == 0)
      return {nullptr, nullptr, &release, Device(TOY, device)};
    auto& memory = memories[device];
    char* data = nullptr;
    if (auto found = memory.cache.find(size); found != memory.cache.end()) {
      data = found->second;
      memory.cache.erase(found);
    } else {
      if (memory.reserved().current + size > memory.limit)
        empty_cache(memory);
      if (memory.reserved().current + size > memory.limit) {
        ++memory.stats.num_ooms;
        TORCH_CHECK_WITH(OutOfMemoryError, false, "toy:", int(device), " is out of memory: ", size, " bytes wanted, ",
            memory.allocated().current, " of ", memory.limit, " taken.");
      }
      data = allocate_host(size);
      memory.reserved().increase(size);
    }
    std::memset(data, UNWRITTEN, size);
    memory.allocated().increase(size);
    memory.stats.allocation[0].increase(1);
    blocks[data] = {size, device, current_stream(device), {}};
    report(data, device, static_cast<int64_t>(size));
    return {data, data, &release, Device(TOY, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t size) const override { std::memcpy(target, source, size); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    Locked locked(lock);
    for (auto& memory : memories)
      empty_cache(memory);
  }
  void recordStream(const c10::DataPtr& data, Stream stream) override {
    Locked locked(lock);
    if (auto found = blocks.find(static_cast<const char*>(data.get_context())); found != blocks.end())
      found->second.users.insert(key_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    Locked locked(lock);
    check_index(device);
    return memories[device].stats;
  }
  void resetAccumulatedStats(DeviceIndex device) override {
    Locked locked(lock);
    memories.at(device).allocated().reset_accumulated();
    memories.at(device).reserved().reset_accumulated();
  }
  void resetPeakStats(DeviceIndex device) override {
    Locked locked(lock);
    memories.at(device).allocated().reset_peak();
    memories.at(device).reserved().reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    Locked locked(lock);
    check_index(device);
    size_t reserved = memories[device].reserved().current;
    return {memories[device].limit - std::min(reserved, memories[device].limit), memories[device].limit};
  }
};

ToyAllocator allocator;
REGISTER_ALLOCATOR(TOY, &allocator)

void ToyGuard::recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const {
  allocator.recordStream(data, stream);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    Locked locked(lock);
    char* data = allocate_host(std::max<size_t>(size, 1));
    blocks[data] = {size, -1, {}, {}};
    return {data, data, &release, Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t size) const override { std::memcpy(target, source, size); }
};

PinnedAllocator pinned_allocator;

const Block* block_of(const void* data) {
  Locked locked(lock);
  auto place = static_cast<const char*>(data);
  auto after = blocks.upper_bound(place);
  if (after == blocks.begin())
    return nullptr;
  auto& [begin, block] = *std::prev(after);
  return place < begin + std::max<size_t>(block.size, 1) ? &block : nullptr;
}

bool is_pinned(const void* data) {
  const Block* block = block_of(data);
  return block != nullptr && block->device < 0;
}

} // namespace
