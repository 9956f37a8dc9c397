// A device that is not the CPU: memory, streams, random numbers, operators and collectives of the type "toy".
//
// Its memory is the host's, so every operator can be computed by torch's kernels for the CPU; but nothing else is lenient:
// - a device has a limit, and memory that was freed stays reserved until the cache is emptied;
// - fresh memory holds NaN, so that a value that was never written shows;
// - a copy from or to pinned memory that is not waited for is carried out as late as its stream allows, so that a missing
//   wait gives a wrong number every time, not now and then;
// - tensors of two devices do not mix.

#include "collectives.h"

#include <torch/csrc/utils/pybind.h>

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
