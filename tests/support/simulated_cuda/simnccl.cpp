// NCCL for the simulated GPUs: gloo's collectives over the same memory, for tensors of GPUs alone.
#include <pybind11/chrono.h>
#include <torch/extension.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "simcuda.h"

namespace {
using at::Tensor;
using Tensors = std::vector<Tensor>;
using c10d::Work;
using WorkPtr = c10::intrusive_ptr<Work>;

Tensor host(const Tensor& tensor) {
  TORCH_CHECK(tensor.is_cuda(), "No backend type associated with device type cpu (simulated NCCL)");
  TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous (simulated NCCL)");
  return simcuda::host(tensor);
}

template <typename T>
std::vector<T> host(const std::vector<T>& all) {
  std::vector<T> out;
  for (auto& each : all) out.push_back(host(each));
  return out;
}

class SimulatedNccl : public c10d::Backend {
 public:
  explicit SimulatedNccl(c10::intrusive_ptr<c10d::Backend> gloo)
      : c10d::Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override { return "simnccl"; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto data = host(tensors);
    return done(gloo_->broadcast(data, options));
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto data = host(tensors);
    auto summed = options;
    const bool averages = sum_instead(summed.reduceOp);
    auto work = done(gloo_->allreduce(data, summed));
    if (averages)
      for (auto& each : data) each.div_(getSize());
    return work;
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    auto data = host(tensors);
    return done(gloo_->allreduce_coalesced(data, options));
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto data = host(tensors);
    return done(gloo_->reduce(data, options));
  }
  WorkPtr allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    auto to = host(out);
    auto from = host(in);
    return done(gloo_->allgather(to, from, options));
  }
  WorkPtr _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& options) override {
    auto to = host(out), from = host(in);
    return done(gloo_->_allgather_base(to, from, options));
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    auto to = host(out), from = host(in);
    return done(gloo_->allgather_into_tensor_coalesced(to, from, options));
  }
  WorkPtr reduce_scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ReduceScatterOptions& options) override {
    auto to = host(out);
    auto from = host(in);
    return done(gloo_->reduce_scatter(to, from, options));
  }
  WorkPtr _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& options) override {
    auto to = host(out), from = host(in).clone();  // gloo reduces in place
    auto summed = options;
    // Gloo's work copies the result into `to` in each call of `wait`, also in the caller's: dividing that is too early.
    if (sum_instead(summed.reduceOp)) from.div_(getSize());
    return done(gloo_->_reduce_scatter_base(to, from, summed));
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& options) override {
    auto to = host(out), from = host(in);
    return done(gloo_->reduce_scatter_tensor_coalesced(to, from, options));
  }
  WorkPtr gather(std::vector<Tensors>& out, Tensors& in, const c10d::GatherOptions& options) override {
    auto to = host(out);
    auto from = host(in);
    return done(gloo_->gather(to, from, options));
  }
  WorkPtr scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ScatterOptions& options) override {
    auto to = host(out);
    auto from = host(in);
    return done(gloo_->scatter(to, from, options));
  }
  WorkPtr alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes,
                        const c10d::AllToAllOptions& options) override {
    auto to = host(out), from = host(in);
    return done(gloo_->alltoall_base(to, from, out_sizes, in_sizes, options));
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override { return done(gloo_->barrier(options)); }

 private:
  // Gloo has no average: the sum, to be divided by the number of ranks.
  static bool sum_instead(c10d::ReduceOp& op) {
    if (op != c10d::ReduceOp::AVG) return false;
    op = c10d::ReduceOp::SUM;
    return true;
  }
  // The memory of `host` must live until the work is done.
  static WorkPtr done(WorkPtr work) {
    work->wait();
    return work;
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
};
}  // namespace

void add_nccl(py::module& module) {
  module.def("make_nccl", [](c10::intrusive_ptr<c10d::Backend> gloo) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<SimulatedNccl>(std::move(gloo));
  });
}
