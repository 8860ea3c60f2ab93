// Operators of the simulated GPUs: those of the CPU over the same memory, after the checks that CUDA makes.
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <torch/library.h>

#include "simcuda.h"

namespace {
using at::Tensor;
using namespace simcuda;

const c10::DispatchKeySet kGpuKeys(c10::DispatchKey::CUDA);

bool on_gpu(const Tensor& tensor) { return tensor.defined() && tensor.device().is_cuda(); }
bool is_scalar(const Tensor& tensor) { return tensor.dim() == 0; }

Tensor empty_memory_format(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                           std::optional<c10::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  OnGpu gpu(resolved(device));
  return at::detail::empty_generic(size, gpu_memory(), kGpuKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  OnGpu gpu(resolved(device));
  return at::detail::empty_strided_generic(size, stride, gpu_memory(), kGpuKeys, c10::dtype_or_default(dtype));
}

// A tensor of `device` with the values of a kernel's new CPU tensor.
Tensor result_on(c10::Device device, const Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  Tensor out = empty_strided(tensor.sizes(), tensor.strides(), tensor.scalar_type(), std::nullopt, device, std::nullopt);
  host(out).copy_(tensor);
  return out;
}

Tensor& copy_(Tensor& self, const Tensor& from, bool) {
  at::AutoDispatchBelowADInplaceOrView guard;
  launch(on_gpu(self) ? self.device() : from.device());
  if (self.sizes() != from.sizes() || self.numel()) host(self).copy_(host(from));
  return self;
}

at::Scalar local_scalar_dense(const Tensor& tensor) { return at::_local_scalar_dense(host(tensor)); }

const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  const size_t bytes = (c10::multiply_integers(size) + self.storage_offset()) * self.dtype().itemsize();
  auto* storage = self.storage().unsafeGetStorageImpl();
  if (bytes > storage->nbytes()) {
    OnGpu gpu(self.device());
    auto fresh = gpu_memory()->allocate(bytes);
    if (storage->nbytes()) std::memcpy(fresh.get(), storage->data(), storage->nbytes());
    storage->set_data_ptr_noswap(std::move(fresh));
    storage->set_nbytes(bytes);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

Tensor& set_storage_offset(Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                           c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  auto sizes = C10_AS_INTARRAYREF_SLOW(size), strides = C10_AS_INTARRAYREF_SLOW(stride);
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset.expect_int());
  const auto contiguous = at::detail::defaultStrides(sizes);
  impl->set_sizes_and_strides(sizes, strides.size() == sizes.size() ? strides : c10::IntArrayRef(contiguous));
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage storage) {
  auto* impl = self.unsafeGetTensorImpl();
  const int64_t numel = storage.nbytes() / self.dtype().itemsize();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(0);
  impl->set_sizes_contiguous({numel});
  return self;
}

Tensor& set_tensor(Tensor& self, const Tensor& from) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(from.storage());
  impl->set_storage_offset(from.storage_offset());
  impl->set_sizes_and_strides(from.sizes(), from.strides());
  return self;
}

// A matrix product with fp32 accumulation and output, which only CUDA has: computed in `dtype` from the start.
template <at::Tensor (*Product)(const Tensor&, const Tensor&)>
Tensor product_in(const Tensor& left, const Tensor& right, at::ScalarType dtype) {
  TORCH_CHECK(left.device() == right.device(), "Expected all tensors to be on the same device, but found at least two devices, ",
              left.device(), " and ", right.device(), "!");
  TORCH_CHECK(left.scalar_type() == right.scalar_type(), "expected m1 and m2 to have the same dtype");
  const bool is_half = left.scalar_type() == at::kBFloat16 || left.scalar_type() == at::kHalf;
  TORCH_CHECK(dtype == left.scalar_type() || (dtype == at::kFloat && is_half),
              "out_dtype must be the same as input dtype or fp32 for fp16/bf16 inputs");
  at::AutoDispatchBelowADInplaceOrView guard;
  launch(left.device());
  return result_on(left.device(), Product(host(left).to(dtype), host(right).to(dtype)));
}
Tensor mm(const Tensor& left, const Tensor& right) { return at::mm(left, right); }
Tensor bmm(const Tensor& left, const Tensor& right) { return at::bmm(left, right); }

// One call of an operator that has no kernel of its own above.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), schema_(op.schema()), stack_(*stack), begin_(stack->size() - op.schema().arguments().size()) {
    const auto& name = schema_.name();
    full_name_ = schema_.overload_name().empty() ? name : name + "." + schema_.overload_name();
    takes_indices_ = name == "aten::index" || name == "aten::index_put_" || name == "aten::_index_put_impl_" ||
                     name == "aten::index_put" || name == "aten::_unsafe_index" || name == "aten::_unsafe_index_put";
    takes_host_scalars_ = takes_indices_ || own_checks.count(full_name_) > 0;
  }

  void run() {
    find_device();
    if (device_ && strict) check_host_tensors();
    at::AutoDispatchBelowADInplaceOrView guard;
    const c10::Device place = resolved(device_);
    launch(place);
    to_host();
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack_);
    for (auto& [ours, theirs] : resized_) {
      resize_(ours, theirs.sizes(), std::nullopt);
      ours.unsafeGetTensorImpl()->set_sizes_and_strides(theirs.sizes(), theirs.strides());
      if (theirs.numel()) host(ours).copy_(theirs);
    }
    to_gpu(place);
  }

 private:
  const c10::Argument& argument(size_t i) const { return schema_.arguments()[i]; }
  size_t count() const { return schema_.arguments().size(); }
  c10::IValue& value(size_t i) { return stack_[begin_ + i]; }

  void see(const Tensor& tensor, const c10::Argument& argument, bool is_index) {
    if (!tensor.defined()) return;
    if (!on_gpu(tensor)) {
      if (!is_index) on_host_.emplace_back(tensor, &argument);
      return;
    }
    const bool is_allowed = takes_host_scalars_ && is_scalar(tensor);
    if (device_ && *device_ != tensor.device() && !is_allowed && strict) refuse(argument, tensor.device());
    if (!device_) device_ = tensor.device();
  }

  void find_device() {
    for (size_t i = 0; i < count(); i++) {
      const bool is_index = takes_indices_ && argument(i).name() == "indices";
      if (value(i).isTensor()) {
        see(value(i).toTensor(), argument(i), is_index);
      } else if (value(i).isTensorList()) {
        for (const Tensor& tensor : value(i).toTensorVector()) see(tensor, argument(i), is_index);
      } else if (value(i).isOptionalTensorList()) {
        for (const auto& tensor : value(i).toOptionalTensorVector())
          if (tensor) see(*tensor, argument(i), is_index);
      } else if (value(i).isDevice() && value(i).toDevice().is_cuda()) {
        if (!device_) device_ = resolved(value(i).toDevice());
        value(i) = c10::Device(at::kCPU);
      } else if (value(i).isGenerator()) {
        TORCH_CHECK(value(i).toGenerator().device().is_cuda(), "Expected a 'cuda' device type for generator but found 'cpu'");
        value(i) = host_generator(value(i).toGenerator());
      }
    }
  }

  void check_host_tensors() {
    for (auto& [tensor, argument] : on_host_) {
      const bool is_number = takes_host_scalars_ || tensor.unsafeGetTensorImpl()->is_wrapped_number();
      if (!is_scalar(tensor) || !is_number || argument->is_out()) refuse(*argument, at::kCPU);
    }
  }

  void refuse(const c10::Argument& argument, c10::Device other) const {
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", *device_, " and ",
                other, "! (when checking argument ", argument.name(), " of ", full_name_, ")");
  }

  Tensor converted(const Tensor& tensor, bool is_out) {
    if (!on_gpu(tensor)) return tensor;
    const bool is_unsized = is_out && !tensor.numel();  // the kernel gives it its size
    Tensor theirs = is_unsized ? at::empty({0}, at::TensorOptions().dtype(tensor.dtype())) : host(tensor);
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) theirs.unsafeGetTensorImpl()->set_wrapped_number(true);
    (is_unsized ? resized_ : aliases_).emplace_back(tensor, theirs);
    return theirs;
  }

  void to_host() {
    for (size_t i = 0; i < count(); i++) {
      const bool is_out = argument(i).is_out();
      if (value(i).isTensor()) {
        value(i) = converted(value(i).toTensor(), is_out);
      } else if (value(i).isTensorList()) {
        c10::List<Tensor> list;
        for (const Tensor& tensor : value(i).toTensorVector()) list.push_back(converted(tensor, is_out));
        value(i) = list;
      } else if (value(i).isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> list;
        for (const auto& tensor : value(i).toOptionalTensorVector())
          list.push_back(tensor ? std::optional<Tensor>(converted(*tensor, false)) : std::nullopt);
        value(i) = list;
      }
    }
    // CUDA also counts integers.
    if (schema_.name() == "aten::histc" && value(0).toTensor().scalar_type() != at::kFloat)
      value(0) = value(0).toTensor().to(at::kFloat);
  }

  Tensor back(const Tensor& tensor, c10::Device place) const {
    if (!tensor.defined()) return tensor;
    for (auto* pairs : {&aliases_, &resized_})
      for (auto& [ours, theirs] : *pairs)
        if (tensor.is_same(theirs)) return ours;
    return result_on(place, tensor);
  }

  void to_gpu(c10::Device place) {
    const size_t returns = schema_.returns().size();
    for (size_t i = stack_.size() - returns; i < stack_.size(); i++) {
      if (stack_[i].isTensor()) {
        stack_[i] = back(stack_[i].toTensor(), place);
      } else if (stack_[i].isTensorList()) {
        c10::List<Tensor> list;
        for (const Tensor& tensor : stack_[i].toTensorVector()) list.push_back(back(tensor, place));
        stack_[i] = list;
      }
    }
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack& stack_;
  const size_t begin_;
  std::string full_name_;
  bool takes_indices_, takes_host_scalars_;
  std::optional<c10::Device> device_;
  std::vector<std::pair<Tensor, const c10::Argument*>> on_host_;
  std::vector<std::pair<Tensor, Tensor>> aliases_, resized_;  // (the GPU's, the host's)
};

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) { Call(op, stack).run(); }
}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", TORCH_FN(empty_memory_format));
  library.impl("empty_strided", TORCH_FN(empty_strided));
  library.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  library.impl("view", TORCH_FN(at::native::view));
  library.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  library.impl("unfold", TORCH_FN(at::native::unfold));
  library.impl("copy_", TORCH_FN(copy_));
  library.impl("resize_", TORCH_FN(resize_));
  library.impl("_local_scalar_dense", TORCH_FN(local_scalar_dense));
  library.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage_offset));
  library.impl("set_.source_Storage", TORCH_FN(set_storage));
  library.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  library.impl("mm.dtype", TORCH_FN((product_in<&mm>)));
  library.impl("bmm.dtype", TORCH_FN((product_in<&bmm>)));
}
