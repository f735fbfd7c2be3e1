// What PyTorch asks of a device: guards, hooks, generators; and what Python asks of this one.
#include "rehearsal.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/extension.h>

namespace rehearsal {

c10::intrusive_ptr<c10d::Backend> collectives(const c10::intrusive_ptr<c10d::Backend>& inner);
void resize_bytes(const c10::Storage& storage, size_t bytes);

namespace {

Event& event_of(void* event) { return **static_cast<std::shared_ptr<Event>*>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {KIND, current_device()}; }
  void setDevice(c10::Device device) const override { set_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < device_count()) set_device(device.index());
  }
  c10::Stream getStream(c10::Device device) const override { return current_queue(device.index()).stream(); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    const auto index = device.index() < 0 ? current_device() : device.index();
    return c10::Stream(c10::Stream::UNSAFE, {KIND, index}, 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device); }
  c10::Stream getNewStream(c10::Device device, int = 0) const override {
    return new_queue(device.index() < 0 ? current_device() : device.index()).stream();
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = current_queue(stream.device_index()).stream();
    set_current(queue_of(stream));
    return before;
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<std::shared_ptr<Event>*>(event);
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new std::shared_ptr<Event>(std::make_shared<Event>());
    event_of(*event).record(queue_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) event_of(event).block(queue_of(stream));
  }
  bool queryEvent(void* event) const override { return !event || event_of(event).query(); }
  void synchronizeEvent(void* event) const override {
    if (event) event_of(event).wait();
  }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    TORCH_CHECK(first && second, "Both events must be recorded");
    event_of(first).wait();
    event_of(second).wait();
    return 1e3 * (event_of(second).at - event_of(first).at);
  }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }
  bool queryStream(const c10::Stream& stream) const override { return queue_of(stream).idle(); }
  void synchronizeStream(const c10::Stream& stream) const override { queue_of(stream).drain(); }
  void synchronizeDevice(const c10::DeviceIndex device) const override { synchronize(device); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_stream(data, queue_of(stream));
  }
};

// Draws what the CPU draws from the same seed.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex device)
      : GeneratorImpl({KIND, device}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        cpu(at::detail::createCPUGenerator()) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "this generator has no offsets"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "this generator has no offsets"); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return cpu.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->cpu = cpu.clone();
    return copy;
  }
  at::Generator cpu;
};

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* const made = [] {
    auto* all = new std::vector<at::Generator>;
    for (c10::DeviceIndex one = 0; one < device_count(); ++one)
      all->push_back(at::make_generator<Generator>(one));
    return all;
  }();
  return made->at(device < 0 ? current_device() : device);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = current_device();
    if (device >= 0) set_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? current_device() : device);
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_bytes(storage, bytes);
  }
};

// The innermost line of Python that is no library's.
std::string site() {
  const py::gil_scoped_acquire locked;
  auto* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  std::string found;
  while (frame) {
    auto* code = PyFrame_GetCode(frame);
    const std::string file = py::str(reinterpret_cast<PyObject*>(code->co_filename));
    Py_DECREF(code);
    if (file.find("site-packages") == std::string::npos) {
      found = file.substr(file.rfind('/') + 1) + ":" + std::to_string(PyFrame_GetLineNumber(frame));
      Py_DECREF(frame);
      break;
    }
    auto* outer = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = outer;
  }
  return found;
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

}  // namespace

at::Generator cpu_generator(const c10::optional<at::Generator>& given, c10::DeviceIndex device) {
  if (given && given->defined() && given->device().type() != KIND) return *given;
  const auto& own = given && given->defined() ? *given : default_generator(device);
  return static_cast<Generator*>(own.unsafeGetGeneratorImpl())->cpu;
}

}  // namespace rehearsal

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace rehearsal;
  at::SetAllocator(KIND, allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  m.def("device_count", &device_count);
  m.def("current_device", &current_device);
  m.def("set_device", &set_device);
  m.def("synchronize", &synchronize, py::arg("device") = -1, py::call_guard<py::gil_scoped_release>());
  m.def("delay", &delay, "At most so many microseconds before each piece of work.");
  m.def("races", &races);
  m.def("clear_races", &clear_races);
  m.def("sites", [](bool named) { set_site(named ? site : std::function<std::string()>()); },
        "Whether races name the lines of Python that launched both sides.");
  m.def("empty_cache", &free_cache, py::call_guard<py::gil_scoped_release>());
  m.def("limit", &limit);
  m.def("reset_peak", &reset_peak);
  m.def("collectives", &collectives);
  m.def("default_generator", [](int device) { return default_generator(static_cast<c10::DeviceIndex>(device)); });
  m.def("memory", [](int device) {
    const auto held = memory(static_cast<c10::DeviceIndex>(device));
    return py::dict(
        py::arg("allocated") = held.allocated, py::arg("peak") = held.peak, py::arg("reserved") = held.reserved,
        py::arg("peak_reserved") = held.peak_reserved, py::arg("total") = held.total,
        py::arg("largest") = held.largest);
  });
}
