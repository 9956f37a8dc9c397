// A device that is not the CPU: memory, streams, random numbers, operators and collectives of the type "toy".
//
// Its memory is the host's, so every operator can be computed by torch's kernels for the CPU; but nothing else is lenient:
// - a device has a limit, and memory that was freed stays reserved until the cache is emptied;
// - fresh memory holds NaN, so that a value that was never written shows;
// - a copy from or to pinned memory that is not waited for is carried out as late as its stream allows, so that a missing
//   wait gives a wrong number every time, not now and then;
// - tensors of two devices do not mix.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/NativeFunctions.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>

namespace {

using at::Tensor;
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

// --- random numbers ----------------------------------------------------------------------------------------------

struct ToyGenerator final : c10::GeneratorImpl {
  // The numbers are those of a generator of the CPU, so that equal seeds draw equal numbers on both.
  at::Generator host = at::detail::createCPUGenerator();

  explicit ToyGenerator(DeviceIndex device)
      : c10::GeneratorImpl(Device(TOY, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { host.set_offset(offset); }
  uint64_t get_offset() const override { return host.get_offset(); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  ToyGenerator* clone_impl() const override {
    auto copy = new ToyGenerator(device().index());
    copy->host = host.clone();
    return copy;
  }
};

const at::Generator& default_generator(DeviceIndex device) {
  static std::vector<at::Generator> generators = [] {
    std::vector<at::Generator> made;
    for (DeviceIndex index = 0; index < COUNT; ++index)
      made.push_back(at::make_generator<ToyGenerator>(index));
    return made;
  }();
  check_index(device < 0 ? current_device : device);
  return generators[device < 0 ? current_device : device];
}

// The CPU's generator draws as the device's for the life of this: for operators that take no generator.
struct LentGenerator {
  at::Generator host = at::detail::getDefaultCPUGenerator();
  at::Generator device;
  Tensor before = host.get_state();
  explicit LentGenerator(DeviceIndex index) : device(default_generator(index)) { host.set_state(device.get_state()); }
  ~LentGenerator() {
    device.set_state(host.get_state());
    host.set_state(before);
  }
};

// --- what torch asks about the device ----------------------------------------------------------------------------

struct ToyHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return COUNT > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return COUNT; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex device) const override {
    check_index(device);
    current_device = device;
  }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    DeviceIndex before = current_device;
    setCurrentDevice(device);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  Device getDeviceFromPtr(void* data) const override {
    const Block* block = block_of(data);
    TORCH_CHECK(block != nullptr && block->device >= 0, "This is no memory of a toy device");
    return Device(TOY, block->device);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<ToyGenerator>(device < 0 ? current_device : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    c10::DeviceGuard guard(storage.device());
    run_all(current_stream(current_device));
    auto data = allocator.allocate(size);
    if (size && storage.nbytes())
      std::memcpy(data.get(), storage.data(), std::min(size, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(size);
  }
};

// --- operators ---------------------------------------------------------------------------------------------------

const c10::DispatchKeySet TOY_KEYS(c10::DispatchKey::PrivateUse1);

// A tensor of the CPU in the same memory.
Tensor on_host(const Tensor& tensor) {
  if (!tensor.defined() || tensor.is_cpu())
    return tensor;
  auto options = tensor.options().device(c10::kCPU).requires_grad(false);
  auto keep = [storage = tensor.storage()](void*) {};
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), keep, options);
}

std::vector<Tensor> on_host(const std::vector<Tensor>& tensors) {
  std::vector<Tensor> found;
  for (auto& tensor : tensors)
    found.push_back(on_host(tensor));
  return found;
}

// Host tensors of which the device's current stream is done.
Tensor when_ready(const Tensor& tensor) {
  if (tensor.defined() && tensor.is_privateuseone())
    run_all(current_stream(tensor.device().index()));
  return on_host(tensor);
}

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &allocator, TOY_KEYS, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &allocator, TOY_KEYS, c10::dtype_or_default(dtype));
}

bool can_wait(const Tensor& source, const Tensor& target) {
  const Tensor& host = source.is_cpu() ? source : target;
  return host.is_cpu() && source.numel() > 0 && is_pinned(host.data_ptr()) && source.dtype() == target.dtype() &&
      source.sizes() == target.sizes() && source.strides() == target.strides() &&
      source.is_non_overlapping_and_dense() && source.is_conj() == target.is_conj() &&
      source.is_neg() == target.is_neg();
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  Device device = source.is_privateuseone() ? source.device() : target.device();
  if (non_blocking && can_wait(source, target)) {
    auto to = static_cast<char*>(target.data_ptr());
    auto from = static_cast<const char*>(source.data_ptr());
    enqueue(current_stream(device.index()), {[to, from, size = source.nbytes()] { std::memcpy(to, from, size); }, to, from});
    return target;
  }
  when_ready(target).copy_(when_ready(source));
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  if (source.sizes() != target.sizes())
    target.resize_(source.sizes());
  return copy_from(source, target, false);
}

const Tensor& resize(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(self.device());
  run_all(current_stream(current_device));
  return at::native::resize_(self, size, format);
}

at::Scalar local_scalar_dense(const Tensor& self) {
  return at::native::_local_scalar_dense_cpu(when_ready(self));
}

Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(source), offset, size, stride);
}

Tensor& set_whole_storage(Tensor& self, at::Storage source) {
  int64_t size = source.nbytes() / self.dtype().itemsize();
  return at::native::set_storage_cpu_(self, std::move(source), 0, {size}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return at::native::set_storage_cpu_(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

void record_stream(Tensor& self, Stream stream) {
  allocator.recordStream(self.storage().data_ptr(), stream);
}

Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups) {
  auto host_bias = bias ? std::optional<Tensor>(when_ready(*bias)) : std::nullopt;
  return at::convolution(when_ready(input), when_ready(weight), host_bias, stride, padding, dilation, transposed,
      output_padding, groups).to(input.device());
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& gradient, const Tensor& input, const Tensor& weight,
    at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
    at::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  auto channels = weight.size(transposed ? 1 : 0) * (transposed ? groups : 1);
  auto [a, b, c] = at::convolution_backward(when_ready(gradient), when_ready(input), when_ready(weight),
      std::vector<int64_t>{channels}, stride, padding, dilation, transposed, output_padding, groups, mask);
  auto device = [&](const Tensor& found) { return found.defined() ? found.to(input.device()) : found; };
  return {device(a), device(b), device(c)};
}

// Its schema does not say that it changes the running statistics, so the fallback would not bring them back.
std::tuple<Tensor, Tensor, Tensor> batch_norm(const Tensor& input, const std::optional<Tensor>& weight,
    const std::optional<Tensor>& bias, const std::optional<Tensor>& mean, const std::optional<Tensor>& variance,
    bool training, double momentum, double eps) {
  auto host = [](const std::optional<Tensor>& given) { return given ? std::optional(when_ready(*given)) : given; };
  auto [a, b, c] = at::native_batch_norm(when_ready(input), host(weight), host(bias), host(mean), host(variance), training,
      momentum, eps);
  return {a.to(input.device()), b.to(input.device()), c.to(input.device())};
}

// Check that an operator's tensors are on one device, and return it. As on other accelerators, a number may be a tensor
// of the CPU without dimensions, and an index may be on the CPU.
struct OneDevice {
  std::string name;
  std::optional<Device> device;
  std::vector<Tensor> host;

  void see(const c10::IValue& value) {
    if (value.isTensor()) {
      see(value.toTensor());
    } else if (value.isTensorList()) {
      for (const Tensor& tensor : value.toTensorVector())
        see(tensor);
    } else if (value.isList()) {
      for (const c10::IValue& entry : value.toListRef())
        see(entry);
    } else if (value.isDevice() && value.toDevice().type() == TOY && !device) {
      device = Device(TOY, value.toDevice().has_index() ? value.toDevice().index() : current_device);
    }
  }
  void see(const Tensor& tensor) {
    if (!tensor.defined())
      return;
    if (!tensor.is_privateuseone()) {
      host.push_back(tensor);
      return;
    }
    TORCH_CHECK(!device || *device == tensor.device(), name, ": tensors are on ", *device, " and on ", tensor.device(),
        ", and toy devices do not mix");
    device = tensor.device();
  }
  Device found() const {
    bool takes_indices = name.find("index") != std::string::npos;
    for (auto& tensor : host)
      TORCH_CHECK(tensor.dim() == 0 || takes_indices || !device, name, ": tensors are on ", *device, " and on ",
          tensor.device(), ", and those do not mix");
    return device.value_or(Device(TOY, current_device));
  }
};

void draw_on(Device device, const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto& arguments = op.schema().arguments();
  bool takes_generator = false;
  for (size_t index = 0; index < arguments.size(); ++index) {
    if (arguments[index].type()->str().find("Generator") == std::string::npos)
      continue;
    takes_generator = true;
    c10::IValue& given = torch::jit::peek(*stack, index, arguments.size());
    auto generator = given.isNone() ? default_generator(device.index()) : given.toGenerator();
    TORCH_CHECK(generator.device().type() == TOY, op.schema().name(), ": expected a generator of ", device,
        " and got one of ", generator.device());
    given = static_cast<ToyGenerator*>(generator.unsafeGetGeneratorImpl())->host;
  }
  if (takes_generator) {
    at::native::cpu_fallback(op, stack);
  } else {
    LentGenerator lent(device.index());
    at::native::cpu_fallback(op, stack);
  }
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  OneDevice tensors{op.schema().name()};
  for (const c10::IValue& value : torch::jit::last(*stack, op.schema().arguments().size()))
    tensors.see(value);
  Device device = tensors.found();
  c10::DeviceGuard guard(device);
  if (op.hasTag(at::Tag::nondeterministic_seeded))
    draw_on(device, op, stack);
  else
    at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("unfold", &at::native::unfold);
  library.impl("resize_", &resize);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar_dense);
  library.impl("set_.source_Storage", &set_whole_storage);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("record_stream", &record_stream);
  library.impl("native_batch_norm", &batch_norm);
  // torch would put these together from others: with other rounding, or with a warning.
  for (const char* name : {"mse_loss", "native_layer_norm", "native_layer_norm_backward"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  library.impl("convolution_overrideable", &convolution);
  library.impl("convolution_backward_overrideable", &convolution_backward);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// --- autocast ----------------------------------------------------------------------------------------------------

#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FULL(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FULL_SET_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

namespace autocast {
using namespace at;
using namespace at::autocast;
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FULL)
  AT_FORALL_FP32_SET_OPT_DTYPE(FULL_SET_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(PROMOTE)
}
} // namespace autocast

// --- collectives -------------------------------------------------------------------------------------------------

using Work = c10::intrusive_ptr<c10d::Work>;

// Work on the host's views of tensors, whose result is the tensors.
struct ToyWork final : c10d::Work {
  c10::intrusive_ptr<c10d::Work> host;
  std::vector<Tensor> outputs;

  ToyWork(::Work host, std::vector<Tensor> outputs)
      : c10d::Work(-1, host->retrieveOpType()), host(std::move(host)), outputs(std::move(outputs)) {}
  bool isCompleted() override { return host->isCompleted(); }
  bool isSuccess() const override { return host->isSuccess(); }
  std::exception_ptr exception() const override { return host->exception(); }
  int sourceRank() const override { return host->sourceRank(); }
  std::vector<Tensor> result() override { return outputs; }
  void synchronize() override { host->wait(); }
  bool wait(std::chrono::milliseconds timeout) override { return host->wait(timeout); }
  void abort() override { host->abort(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    std::vector<Device> devices;
    if (!outputs.empty())
      devices.push_back(outputs.front().device());
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
    host->getFuture()->addCallback([future, outputs = outputs](c10::ivalue::Future& done) {
      if (done.hasError())
        future->setError(done.exception_ptr());
      else
        future->markCompleted(c10::IValue(outputs));
    });
    return future;
  }
};

// Collectives over another backend's, of the CPU.
struct ToyGroup final : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> host;

  explicit ToyGroup(c10::intrusive_ptr<c10d::Backend> host)
      : c10d::Backend(host->getRank(), host->getSize()), host(std::move(host)) {}
  const std::string getBackendName() const override { return "toy"; }
  void setSequenceNumberForGroup() override { host->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return host->getSequenceNumberForGroup(); }
  void setTimeout(std::chrono::milliseconds timeout) override { host->setTimeout(timeout); }
  void abort() override { host->abort(); }
  void shutdown() override { host->shutdown(); }

  using Tensors = std::vector<Tensor>;
  static Tensors views(const Tensors& tensors) {
    for (auto& tensor : tensors)
      TORCH_CHECK(tensor.is_privateuseone(), "Collectives of toy devices got a tensor on ", tensor.device());
    for (auto& tensor : tensors)
      run_all(current_stream(tensor.device().index()));
    return on_host(tensors);
  }
  static std::vector<Tensors> views(const std::vector<Tensors>& lists) {
    std::vector<Tensors> found;
    for (auto& list : lists)
      found.push_back(views(list));
    return found;
  }
  static ::Work work(::Work host, Tensors outputs) {
    return c10::make_intrusive<ToyWork>(std::move(host), std::move(outputs));
  }
  static Tensors flat(const std::vector<Tensors>& lists) {
    Tensors found;
    for (auto& list : lists)
      found.insert(found.end(), list.begin(), list.end());
    return found;
  }

// Collectives that change the tensors that they are given.
#define IN_PLACE(NAME, OPTIONS)                                                    \
  ::Work NAME(Tensors& tensors, const c10d::OPTIONS& options) override {           \
    auto own = views(tensors);                                                     \
    return work(host->NAME(own, options), tensors);                                \
  }
// Collectives that write to one of two structures.
#define OUT_OF_PLACE(NAME, OUTPUT, INPUT, OPTIONS, RESULT)                         \
  ::Work NAME(OUTPUT& outputs, INPUT& inputs, const c10d::OPTIONS& options) override { \
    auto to = views(outputs);                                                      \
    auto from = views(inputs);                                                     \
    return work(host->NAME(to, from, options), RESULT);                            \
  }
  static Tensor views(const Tensor& tensor) { return views(Tensors{tensor})[0]; }

  IN_PLACE(broadcast, BroadcastOptions)
  IN_PLACE(allreduce, AllreduceOptions)
  IN_PLACE(allreduce_coalesced, AllreduceCoalescedOptions)
  IN_PLACE(reduce, ReduceOptions)
  OUT_OF_PLACE(allgather, std::vector<Tensors>, Tensors, AllgatherOptions, flat(outputs))
  OUT_OF_PLACE(allgather_coalesced, std::vector<Tensors>, Tensors, AllgatherOptions, flat(outputs))
  OUT_OF_PLACE(allgather_into_tensor_coalesced, Tensors, Tensors, AllgatherOptions, outputs)
  OUT_OF_PLACE(gather, std::vector<Tensors>, Tensors, GatherOptions, flat(outputs))
  OUT_OF_PLACE(scatter, Tensors, std::vector<Tensors>, ScatterOptions, outputs)
  OUT_OF_PLACE(reduce_scatter, Tensors, std::vector<Tensors>, ReduceScatterOptions, outputs)
  OUT_OF_PLACE(reduce_scatter_tensor_coalesced, Tensors, Tensors, ReduceScatterOptions, outputs)
  OUT_OF_PLACE(alltoall, Tensors, Tensors, AllToAllOptions, outputs)
  OUT_OF_PLACE(_allgather_base, Tensor, Tensor, AllgatherOptions, Tensors{outputs})
  OUT_OF_PLACE(_reduce_scatter_base, Tensor, Tensor, ReduceScatterOptions, Tensors{outputs})

  ::Work alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes,
      std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) override {
    auto to = views(output), from = views(input);
    return work(host->alltoall_base(to, from, output_sizes, input_sizes, options), {output});
  }
  ::Work send(Tensors& tensors, int rank, int tag) override {
    auto own = views(tensors);
    return work(host->send(own, rank, tag), tensors);
  }
  ::Work recv(Tensors& tensors, int rank, int tag) override {
    auto own = views(tensors);
    return work(host->recv(own, rank, tag), tensors);
  }
  ::Work recvAnysource(Tensors& tensors, int tag) override {
    auto own = views(tensors);
    return work(host->recvAnysource(own, tag), tensors);
  }
  ::Work barrier(const c10d::BarrierOptions& options) override {
    auto own = options;
    own.device = Device(c10::DeviceType::CPU);
    own.device_ids.clear();
    return work(host->barrier(own), {});
  }
};

} // namespace

PYBIND11_MODULE(_toy, library) {
  at::RegisterPrivateUse1HooksInterface(new ToyHooks());
  library.def("device_count", [] { return int(COUNT); });
  library.def("default_generator", [](int device) { return default_generator(device); });
  library.def("set_memory_limit", [](int device, size_t limit) {
    Locked locked(lock);
    check_index(device);
    memories[device].limit = limit;
  });
  library.def("num_waiting", [](int device) {
    Locked locked(lock);
    size_t count = 0;
    for (auto& [stream, queue] : queues)
      count += stream.first == device ? queue.waiting.size() : 0;
    return count;
  });
  library.def("group_over", [](const c10::intrusive_ptr<c10d::Backend>& host) {
    return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<ToyGroup>(host));
  });
}
