// Operators: the CPU's kernels, launched on the current stream. An operator whose result depends on data, or that draws
// random numbers, waits for its stream and runs on the host's thread.
#include "rehearsal.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

namespace rehearsal {

at::Generator cpu_generator(const c10::optional<at::Generator>& given, c10::DeviceIndex device);

namespace {

using torch::jit::Stack;

bool is_ours(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == KIND;
}

// Bytes of a storage from a tensor's first element to its last one.
Range range_of(const at::Tensor& tensor, bool write) {
  const auto* block = static_cast<const char*>(tensor.storage().data());
  auto* first = const_cast<char*>(block) + tensor.storage_offset() * tensor.itemsize();
  if (!tensor.numel()) return {block, first, first, write};
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  return {block, first, first + (last + 1) * tensor.itemsize(), write};
}

// Tensors of the CPU on the bytes of the device's. Those of one storage share one, so that overlap is seen.
class Aliases {
 public:
  at::Tensor of(const at::Tensor& tensor) {
    auto* own = tensor.storage().unsafeGetStorageImpl();
    auto& shared = storages_[own];
    if (!shared)
      shared = c10::Storage(
          c10::Storage::use_byte_size_t(), own->nbytes(),
          at::DataPtr(alias(tensor.storage().data()), nullptr, [](void*) {}, c10::Device(c10::kCPU)), nullptr,
          false);
    auto found = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(shared), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    auto* impl = found.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
    return found;
  }

 private:
  std::map<c10::StorageImpl*, c10::Storage> storages_;
};

using Map = std::function<at::Tensor(const at::Tensor&)>;

// A value with its tensors mapped; lists are new ones.
c10::IValue mapped(const c10::IValue& value, const Map& map) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(map(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> found;
    for (const at::Tensor& one : value.toTensorList()) found.push_back(map(one));
    return found;
  }
  if (value.isOptionalTensorList()) {
    c10::List<c10::optional<at::Tensor>> found;
    for (const c10::optional<at::Tensor>& one : value.toOptionalTensorList())
      found.push_back(one && one->defined() ? c10::optional<at::Tensor>(map(*one)) : one);
    return found;
  }
  return value;
}

void each(const c10::IValue& value, const std::function<void(const at::Tensor&)>& visit) {
  mapped(value, [&](const at::Tensor& one) {
    visit(one);
    return one;
  });
}

bool writes(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

at::Tensor new_tensor(const at::Tensor& like, c10::Device device) {
  return at::empty_strided(like.sizes(), like.strides(), like.options().device(device));
}

at::Tensor on_meta(const at::Tensor& tensor) {
  if (!is_ours(tensor)) return tensor;  // a scalar of the host
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta));
}

void run_on_cpu(const c10::OperatorHandle& op, Stack& stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
}

// One operator as it is launched.
class Launch {
 public:
  Launch(const c10::OperatorHandle& op, Stack& stack) : op_(op), stack_(stack), schema_(op.schema()) {
    const size_t count = schema_.arguments().size();
    arguments_.assign(stack.end() - count, stack.end());
    for (const auto& argument : arguments_) {
      each(argument, [&](const at::Tensor& one) {
        if (is_ours(one) && device_.type() != KIND) device_ = one.device();
      });
      if (argument.isDevice() && device_.type() != KIND) device_ = argument.toDevice();
    }
    if (device_.type() != KIND || device_.index() < 0) device_ = c10::Device(KIND, current_device());
    check_devices();
  }

  void operator()() {
    const c10::OptionalDeviceGuard guard(device_);
    // What is computed from data, and random numbers in the order of the program, are for the host.
    const bool host = op_.hasTag(at::Tag::dynamic_output_shape) || op_.hasTag(at::Tag::data_dependent_output) ||
        op_.hasTag(at::Tag::nondeterministic_seeded);
    if (host || !shapes_known())
      now();
    else
      later();
    torch::jit::drop(stack_, arguments_.size());
    for (auto& result : results_) stack_.push_back(std::move(result));
  }

 private:
  std::string name() const { return c10::toString(schema_.operator_name()); }

  void check_devices() const {
    const bool indexes = name().find("index") != std::string::npos;
    for (const auto& argument : arguments_)
      each(argument, [&](const at::Tensor& one) {
        const bool fits = is_ours(one) ? one.device() == device_ : one.dim() == 0 || indexes;
        TORCH_CHECK(
            fits, "Expected all tensors to be on the same device, but ", name(), " has ", device_, " and ",
            one.device());
      });
  }

  // A scalar of the host, or indices, are copied at the launch.
  Map to_cpu(Aliases& aliases) const {
    return [&](const at::Tensor& one) {
      if (is_ours(one)) return aliases.of(one);
      auto copied = one.clone();
      if (one.unsafeGetTensorImpl()->is_wrapped_number())
        copied.unsafeGetTensorImpl()->set_wrapped_number(true);
      return copied;
    };
  }

  Stack mapped_arguments(const Map& map, c10::Device device) const {
    Stack found;
    for (size_t at = 0; at < arguments_.size(); ++at) {
      const auto& argument = arguments_[at];
      const auto& type = *schema_.arguments()[at].type();
      if (argument.isDevice())
        found.emplace_back(device);
      else if (argument.isGenerator())
        found.emplace_back(cpu_generator(argument.toGenerator(), device_.index()));
      else if (argument.isNone() && type.repr_str() == "Generator?")
        found.emplace_back(cpu_generator({}, device_.index()));
      else
        found.push_back(mapped(argument, map));
    }
    return found;
  }

  // Whether results have known shapes: those of arguments that are written, else what the operator says of tensors
  // without data.
  bool shapes_known() {
    bool all_given = true;
    for (const auto& result : schema_.returns()) all_given = all_given && writes(result);
    bool resizes = false;
    for (const auto& argument : schema_.arguments())
      resizes = resizes || (writes(argument) && argument.kwarg_only());
    if (all_given && !resizes) return true;
    Stack stack = mapped_arguments(on_meta, c10::Device(c10::kMeta));
    Stack before = stack;
    try {
      at::AutoDispatchBelowADInplaceOrView below;
      c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
    } catch (const std::exception&) {
      return false;
    }
    for (const auto& one : stack)
      if (!one.isTensor() && !one.isTensorList()) return false;
    if (resizes) resize(before);
    shapes_ = std::move(stack);
    return true;
  }

  // Results that are given, and have another shape than they get.
  void resize(const Stack& shapes) const {
    for (size_t at = 0; at < arguments_.size(); ++at) {
      if (!writes(schema_.arguments()[at]) || !arguments_[at].isTensor()) continue;
      const auto& given = arguments_[at].toTensor();
      const auto& shape = shapes[at].toTensor();
      if (given.defined() && given.sizes() != shape.sizes()) given.resize_(shape.sizes());
    }
  }

  // The argument that a result is.
  const c10::IValue& written(size_t result) const {
    const auto& symbols = schema_.returns()[result].alias_info()->beforeSets();
    for (size_t at = 0; at < arguments_.size(); ++at)
      if (writes(schema_.arguments()[at]) && schema_.arguments()[at].alias_info()->beforeSets() == symbols)
        return arguments_[at];
    TORCH_CHECK(false, name(), " writes what it was not given");
  }

  std::vector<Range> ranges() const {
    std::vector<Range> found;
    for (size_t at = 0; at < arguments_.size(); ++at)
      each(arguments_[at], [&](const at::Tensor& one) {
        if (is_ours(one)) found.push_back(range_of(one, writes(schema_.arguments()[at])));
      });
    return found;
  }

  void later() {
    Aliases aliases;
    Stack inputs = mapped_arguments(to_cpu(aliases), c10::Device(c10::kCPU));
    auto accesses = ranges();
    Stack targets;  // results that are new, as the CPU sees them
    for (size_t at = 0; at < schema_.returns().size(); ++at) {
      const auto* info = schema_.returns()[at].alias_info();
      if (info && info->isWrite()) {
        results_.push_back(written(at));
        targets.emplace_back();
        continue;
      }
      TORCH_CHECK(!info, name(), " gives a view, which the rehearsal device has no kernel for");
      results_.push_back(mapped(shapes_[at], [&](const at::Tensor& shape) {
        auto made = new_tensor(shape, device_);
        accesses.push_back(range_of(made, true));
        return made;
      }));
      targets.push_back(mapped(results_.back(), [&](const at::Tensor& one) { return aliases.of(one); }));
    }
    auto& queue = current_queue(device_.index());
    access(&queue, name(), accesses);
    queue.give([op = op_, inputs = std::move(inputs), targets = std::move(targets)]() mutable {
      run_on_cpu(op, inputs);
      for (size_t at = 0; at < targets.size(); ++at) {
        if (targets[at].isTensor() && targets[at].toTensor().defined())
          targets[at].toTensor().copy_(inputs[at].toTensor());
        if (targets[at].isTensorList())
          for (size_t one = 0; one < targets[at].toTensorVector().size(); ++one)
            targets[at].toTensorVector()[one].copy_(inputs[at].toTensorVector()[one]);
      }
    });
  }

  void now() {
    auto& queue = current_queue(device_.index());
    Aliases aliases;
    Stack inputs = mapped_arguments(to_cpu(aliases), c10::Device(c10::kCPU));
    access(&queue, name(), ranges());
    queue.drain();
    run_on_cpu(op_, inputs);
    for (size_t at = 0; at < schema_.returns().size(); ++at) {
      const auto* info = schema_.returns()[at].alias_info();
      if (info && info->isWrite()) {
        results_.push_back(written(at));
        continue;
      }
      results_.push_back(mapped(inputs[at], [&](const at::Tensor& one) {
        auto made = new_tensor(one, device_);
        queue.drain();  // its poison
        access(&queue, name(), {range_of(made, true)});
        aliases.of(made).copy_(one);
        return made;
      }));
    }
  }

  const c10::OperatorHandle& op_;
  Stack& stack_;
  const c10::FunctionSchema& schema_;
  Stack arguments_, results_, shapes_;
  c10::Device device_ = c10::Device(c10::kCPU);
};

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  Launch(op, *stack)();
}

at::Tensor empty(
    c10::IntArrayRef size, c10::optional<at::ScalarType> dtype, c10::optional<at::Layout>,
    c10::optional<at::Device> device, c10::optional<bool>, c10::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, allocator(), keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, c10::optional<at::ScalarType> dtype,
    c10::optional<at::Layout>, c10::optional<at::Device> device, c10::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, allocator(), keys, c10::dtype_or_default(dtype));
}

// Copies to and from memory of the host return at once where that is pinned, and the caller says so.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const at::Tensor& ours = is_ours(to) ? to : from;
  const c10::DeviceGuard guard(ours.device());
  auto& queue = current_queue(ours.device().index());
  const bool between = is_ours(from) && is_ours(to);
  // What was given to the other device comes before a copy from it, and what is given to it then comes after.
  const auto apart = between && from.device() != to.device() ? std::make_shared<Event>() : nullptr;
  if (apart) {
    apart->record(current_queue(from.device().index()));
    apart->block(queue);
  }
  const at::Tensor& host = is_ours(to) ? from : to;
  const bool pinned = !between && is_pinned(host.storage().data());
  Aliases aliases;
  const auto seen = [&](const at::Tensor& one) { return is_ours(one) ? aliases.of(one) : one.detach(); };
  std::vector<Range> ranges;
  if (is_ours(from)) ranges.push_back(range_of(from, false));
  if (is_ours(to)) ranges.push_back(range_of(to, true));
  access(&queue, between ? "a copy" : is_ours(to) ? "a copy from the host" : "a copy to the host", ranges);
  const bool expands = from.sizes() != to.sizes();
  auto source = seen(expands ? from.expand_as(to) : from);
  const uint64_t work = queue.give([source, target = seen(to)]() mutable {
    at::AutoDispatchBelowADInplaceOrView below;
    target.copy_(source);
  });
  if (apart) {
    apart->record(queue);
    apart->block(current_queue(from.device().index()));
  }
  if (pinned && non_blocking) {
    used_by(host.storage().data(), queue, work);
  } else if (!between) {
    queue.drain();
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  auto& queue = current_queue(tensor.device().index());
  access(&queue, "item", {range_of(tensor, false)});
  queue.drain();
  Aliases aliases;
  return at::_local_scalar_dense(aliases.of(tensor));
}

void grow(c10::StorageImpl* storage, c10::Device device, size_t bytes) {
  const c10::DeviceGuard guard(device);
  auto data = allocator()->allocate(bytes);
  const size_t both = std::min(bytes, storage->nbytes());
  auto& queue = current_queue(device.index());
  const auto range = [both](const void* at, bool write) {
    auto* begin = static_cast<char*>(const_cast<void*>(at));
    return Range{at, begin, begin + both, write};
  };
  if (both) {
    access(&queue, "resize", {range(storage->data(), false), range(data.get(), true)});
    queue.give([to = alias(data.get()), from = alias(storage->data()), both] { std::memcpy(to, from, both); });
  }
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}

const at::Tensor& resize(
    const at::Tensor& self, c10::IntArrayRef size, c10::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  const size_t bytes = (self.storage_offset() + self.numel()) * self.itemsize();
  auto* storage = self.storage().unsafeGetStorageImpl();
  if (storage->nbytes() < bytes) grow(storage, self.device(), bytes);
  return self;
}

at::Tensor& set_to(
    at::Tensor& self, const c10::Storage& source, int64_t offset, c10::IntArrayRef size,
    c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source);
  if (stride.data())
    impl->set_sizes_and_strides(size, stride, offset);
  else {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  }
  return self;
}

// The operator's own signature: it is called by it.
at::Tensor& set_part(
    at::Tensor& self, c10::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride) {
  return set_to(
      self, source, offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor& set_storage(at::Tensor& self, c10::Storage source) {
  return set_to(self, source, 0, {static_cast<int64_t>(source.nbytes() / self.itemsize())}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_to(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, allocator()->allocate(0), allocator(), true);
  return set_to(self, none, 0, {0}, {});
}

void record(at::Tensor& self, c10::Stream stream) {
  record_stream(self.storage().data_ptr(), queue_of(stream));
}

}  // namespace

void resize_bytes(const c10::Storage& storage, size_t bytes) {
  if (bytes == 0) {
    const c10::DeviceGuard guard(storage.device());
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(allocator()->allocate(0));
    storage.unsafeGetStorageImpl()->set_nbytes(0);
  } else {
    grow(storage.unsafeGetStorageImpl(), storage.device(), bytes);
  }
}

std::vector<at::Tensor> aliases_of(const std::vector<at::Tensor>& tensors) {
  Aliases aliases;
  std::vector<at::Tensor> found;
  for (const auto& one : tensors) found.push_back(is_ours(one) ? aliases.of(one) : one);
  return found;
}

std::vector<Range> ranges_of(const std::vector<at::Tensor>& tensors, bool write) {
  std::vector<Range> found;
  for (const auto& one : tensors)
    if (is_ours(one)) found.push_back(range_of(one, write));
  return found;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_part);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("record_stream", record);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  // What PyTorch would compose of other operators, where the CPU has a kernel: so bits are the CPU's.
  for (const char* name : {"silu_backward", "mish_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace rehearsal
