// Collectives: those of gloo, queued on a stream of their own, as NCCL's are. Waiting for one makes the current stream
// wait, and not the host.
#include "rehearsal.h"

#include <c10/core/DeviceGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace rehearsal {

std::vector<at::Tensor> aliases_of(const std::vector<at::Tensor>& tensors);
std::vector<Range> ranges_of(const std::vector<at::Tensor>& tensors, bool write);

namespace {

using c10d::Backend;
using c10d::Work;
using Tensors = std::vector<at::Tensor>;
using Pointer = c10::intrusive_ptr<Work>;

// A collective that was given to its stream.
struct Given final : Work {
  Given(c10::DeviceIndex device, Tensors used, Tensors results, c10d::OpType kind)
      : Work(-1, kind), device_(device), used_(std::move(used)), results_(std::move(results)) {}

  bool isCompleted() override { return done->query(); }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void synchronize() override {
    done->block(current_queue(device_));
    used_.clear();  // what it used lives until somebody waits for it
  }
  Tensors result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }

  const std::shared_ptr<Event> done = std::make_shared<Event>();
  c10::intrusive_ptr<c10::ivalue::Future> future;

 private:
  c10::DeviceIndex device_;
  Tensors used_, results_;
};

Tensors flat(const std::vector<Tensors>& lists) {
  Tensors found;
  for (const auto& list : lists) found.insert(found.end(), list.begin(), list.end());
  return found;
}

class Collectives final : public Backend {
 public:
  // Work that is queued keeps the group that it is for (`inner`), which may be gone before.
  explicit Collectives(c10::intrusive_ptr<Backend> inner)
      : Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)) {}

  const std::string getBackendName() const override { return "rehearsal"; }

  Pointer broadcast(Tensors& all, const c10d::BroadcastOptions& options) override {
    return give(c10d::OpType::BROADCAST, all, all, [=, inner = inner_](Tensors in, Tensors) {
      return inner->broadcast(in, options);
    });
  }
  Pointer allreduce(Tensors& all, const c10d::AllreduceOptions& options) override {
    return give(c10d::OpType::ALLREDUCE, all, all, [=, inner = inner_](Tensors in, Tensors) {
      return inner->allreduce(in, options);
    });
  }
  Pointer reduce(Tensors& all, const c10d::ReduceOptions& options) override {
    return give(c10d::OpType::REDUCE, all, all, [=, inner = inner_](Tensors in, Tensors) {
      return inner->reduce(in, options);
    });
  }
  Pointer allgather(
      std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    return give(c10d::OpType::ALLGATHER, in, flat(out), [=, inner = inner_](Tensors from, Tensors to) {
      std::vector<Tensors> lists{to};
      return inner->allgather(lists, from, options);
    });
  }
  Pointer _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& options) override {
    return give(c10d::OpType::_ALLGATHER_BASE, {in}, {out}, [=, inner = inner_](Tensors from, Tensors to) {
      return inner->_allgather_base(to[0], from[0], options);
    });
  }
  Pointer _reduce_scatter_base(
      at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& options) override {
    return give(c10d::OpType::_REDUCE_SCATTER_BASE, {in}, {out}, [=, inner = inner_](Tensors from, Tensors to) {
      return inner->_reduce_scatter_base(to[0], from[0], options);
    });
  }
  Pointer allgather_into_tensor_coalesced(
      Tensors& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    return give(c10d::OpType::COALESCED, in, out, [=, inner = inner_](Tensors from, Tensors to) {
      return inner->allgather_into_tensor_coalesced(to, from, options);
    });
  }
  Pointer reduce_scatter_tensor_coalesced(
      Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& options) override {
    return give(c10d::OpType::COALESCED, in, out, [=, inner = inner_](Tensors from, Tensors to) {
      return inner->reduce_scatter_tensor_coalesced(to, from, options);
    });
  }
  Pointer allreduce_coalesced(Tensors& all, const c10d::AllreduceCoalescedOptions& options) override {
    return give(c10d::OpType::COALESCED, all, all, [=, inner = inner_](Tensors in, Tensors) {
      return inner->allreduce_coalesced(in, options);
    });
  }
  Pointer reduce_scatter(
      Tensors& out, std::vector<Tensors>& in, const c10d::ReduceScatterOptions& options) override {
    return give(c10d::OpType::REDUCE_SCATTER, flat(in), out, [=, inner = inner_](Tensors from, Tensors to) {
      std::vector<Tensors> lists{from};
      return inner->reduce_scatter(to, lists, options);
    });
  }
  Pointer alltoall_base(
      at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes,
      const c10d::AllToAllOptions& options) override {
    return give(c10d::OpType::ALLTOALL_BASE, {in}, {out}, [=, inner = inner_](Tensors from, Tensors to) mutable {
      return inner->alltoall_base(to[0], from[0], out_sizes, in_sizes, options);
    });
  }
  Pointer gather(std::vector<Tensors>& out, Tensors& in, const c10d::GatherOptions& options) override {
    return give(c10d::OpType::GATHER, in, flat(out), [=, inner = inner_, any = !out.empty()](Tensors from, Tensors to) {
      std::vector<Tensors> lists;
      if (any) lists.push_back(to);
      return inner->gather(lists, from, options);
    });
  }
  Pointer scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ScatterOptions& options) override {
    return give(c10d::OpType::SCATTER, flat(in), out, [=, inner = inner_, any = !in.empty()](Tensors from, Tensors to) {
      std::vector<Tensors> lists;
      if (any) lists.push_back(from);
      return inner->scatter(to, lists, options);
    });
  }
  // Ranks meet in pairs: what goes one way does not wait for what goes another.
  Pointer send(Tensors& all, int to, int tag) override {
    return give(c10d::OpType::SEND, all, {}, [=, inner = inner_](Tensors in, Tensors) { return inner->send(in, to, tag); },
                2 * to + 1);
  }
  Pointer recv(Tensors& all, int from, int tag) override {
    return give(c10d::OpType::RECV, {}, all, [=, inner = inner_](Tensors, Tensors out) { return inner->recv(out, from, tag); },
                2 * from + 2);
  }
  Pointer barrier(const c10d::BarrierOptions& options) override {
    rehearsal::synchronize(current_device());
    inner_->barrier(options)->wait();
    return give(c10d::OpType::BARRIER, {}, {}, nullptr);
  }

 private:
  using Run = std::function<Pointer(Tensors, Tensors)>;

  Pointer give(c10d::OpType kind, const Tensors& in, const Tensors& out, Run run, int lane = 0) {
    Tensors used(in);
    used.insert(used.end(), out.begin(), out.end());
    const auto device = used.empty() ? current_device() : used[0].device().index();
    auto& stream = queue(device, lane);
    auto work = c10::make_intrusive<Given>(device, used, out, kind);
    const auto before = std::make_shared<Event>();
    before->record(current_queue(device));
    before->block(stream);
    if (run) {
      auto accesses = ranges_of(in, false);
      for (auto& range : ranges_of(out, true)) accesses.push_back(range);
      access(&stream, c10d::opTypeToString(kind), accesses);
      stream.give([run = std::move(run), from = aliases_of(in), to = aliases_of(out)] { run(from, to)->wait(); });
    }
    work->done->record(stream);
    complete(*work, stream, out.empty() ? in : out);
    return work;
  }

  static void complete(Given& work, Queue& stream, const Tensors& results) {
    const c10::Device device(KIND, stream.device);
    work.future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device});
    auto& before = current_queue(stream.device);
    set_current(stream);
    work.future->markCompleted(c10::IValue(results));
    set_current(before);
  }

  Queue& queue(c10::DeviceIndex device, int lane) {
    auto& found = queues_[{device, lane}];
    if (!found) found = &new_queue(device);
    return *found;
  }

  c10::intrusive_ptr<Backend> inner_;
  std::map<std::pair<c10::DeviceIndex, int>, Queue*> queues_;
};

}  // namespace

c10::intrusive_ptr<Backend> collectives(const c10::intrusive_ptr<Backend>& inner) {
  return c10::make_intrusive<Collectives>(inner);
}

}  // namespace rehearsal
