// Collectives of toy devices, over the host's.

#pragma once

#include "operators.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace {

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
