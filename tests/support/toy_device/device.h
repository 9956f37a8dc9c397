// Random numbers of the toy device, and what torch asks about it.

#pragma once

#include "memory.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>

namespace {

using at::Tensor;

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

} // namespace
