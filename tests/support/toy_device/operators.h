// Operators of the toy device: a few of its own, all others by torch's kernels for the CPU.

#pragma once

#include "device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/autocast_mode.h>
#include <ATen/native/CPUFallback.h>
#include <torch/library.h>

namespace {

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

} // namespace
