// Simulated GPUs: tensors of device `cuda:N` in a CPU build of torch.
// Their memory is the host's, their kernels are the CPU's (simkernels.cpp), but they are kept apart as CUDA keeps them.
#include "simcuda.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <sys/syscall.h>
#include <torch/extension.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <mutex>
#include <tuple>
#include <unordered_map>

namespace simcuda {
int num_gpus = 8;
bool strict = true;
std::unordered_set<std::string> own_checks;
thread_local c10::DeviceIndex current_gpu = 0;

namespace {
thread_local c10::StreamId current_stream[kMaxGpus] = {};
std::atomic<c10::StreamId> num_streams{0};
std::atomic<int64_t> allocated[kMaxGpus], peak[kMaxGpus], limit[kMaxGpus], kernels[kMaxGpus];

// Kernels by (thread, its current GPU, the GPU they ran on), while somebody records them.
std::atomic<bool> is_recording{false};
std::mutex launches_lock;
std::map<std::tuple<int64_t, int, int>, int64_t> launches;

void check_ordinal(c10::DeviceIndex index) {
  if (index >= num_gpus) throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, 101, "CUDA error: invalid device ordinal");
}

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kGpu; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return c10::Device(kGpu, current_gpu); }
  void setDevice(c10::Device device) const override {
    check_ordinal(device.index());
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_gpu = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    if (!device.has_index()) device = getDevice();
    return c10::Stream(c10::Stream::UNSAFE, device, current_stream[device.index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device.has_index() ? device : getDevice());
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return c10::Stream(c10::Stream::UNSAFE, device.has_index() ? device : getDevice(), ++num_streams);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    current_stream[stream.device_index()] = stream.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(num_gpus); }
  // Work is done when it is launched, so events and synchronisation have nothing to do.
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct Block {
  size_t bytes;
  int gpu;
};
std::mutex blocks_lock;
std::unordered_map<void*, Block> blocks;

void release(void* data) {
  if (!data) return;
  Block block;
  {
    std::lock_guard<std::mutex> guard(blocks_lock);
    auto found = blocks.find(data);
    block = found->second;
    blocks.erase(found);
  }
  allocated[block.gpu] -= block.bytes;
  c10::free_cpu(data);
}

struct GpuMemory final : public c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const int gpu = current_gpu;
    const c10::Device device(kGpu, gpu);
    if (!bytes) return {nullptr, nullptr, &release, device};
    const int64_t now = allocated[gpu] += bytes;
    if (limit[gpu] && now > limit[gpu]) {
      allocated[gpu] -= bytes;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", bytes, " bytes. GPU ", gpu,
                       " has a total capacity of ", limit[gpu].load(), " bytes of which ",
                       std::max<int64_t>(0, limit[gpu] - allocated[gpu]), " bytes is free (simulated).");
    }
    for (auto most = peak[gpu].load(); most < now && !peak[gpu].compare_exchange_weak(most, now);) {
    }
    void* data = c10::alloc_cpu(bytes);
    std::lock_guard<std::mutex> guard(blocks_lock);
    blocks[data] = {bytes, gpu};
    return {data, data, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};
GpuMemory memory;

std::mutex pinned_lock;
std::map<const char*, size_t> pinned_blocks;

void unpin(void* data) {
  if (!data) return;
  {
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned_blocks.erase(static_cast<const char*>(data));
  }
  c10::free_cpu(data);
}

struct PinnedMemory final : public c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (!bytes) return {nullptr, nullptr, &unpin, c10::Device(c10::DeviceType::CPU)};
    void* data = c10::alloc_cpu(bytes);
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned_blocks[static_cast<const char*>(data)] = bytes;
    return {data, data, &unpin, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};
PinnedMemory pinned_memory;

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> guard(pinned_lock);
  auto after = pinned_blocks.upper_bound(static_cast<const char*>(data));
  if (after == pinned_blocks.begin()) return false;
  auto [start, bytes] = *std::prev(after);
  return static_cast<const char*>(data) < start + bytes;
}

// A generator of a GPU; a CPU generator draws its numbers. Those of all GPUs and of the CPU are one by default,
// since kernels without a generator argument (dropout) draw from the CPU's.
struct GpuGenerator final : public c10::GeneratorImpl {
  at::Generator cpu;
  GpuGenerator(at::Generator cpu, c10::DeviceIndex gpu)
      : c10::GeneratorImpl(c10::Device(kGpu, gpu), c10::DispatchKeySet(c10::DispatchKey::CUDA)), cpu(std::move(cpu)) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { cpu.set_offset(offset); }
  uint64_t get_offset() const override { return cpu.get_offset(); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  c10::GeneratorImpl* clone_impl() const override { return new GpuGenerator(cpu.clone(), device().index()); }
};

const at::Generator& default_generator(c10::DeviceIndex gpu) {
  static const std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < kMaxGpus; i++)
      made.push_back(at::make_generator<GpuGenerator>(at::detail::getDefaultCPUGenerator(), i));
    return made;
  }();
  return all[gpu < 0 ? current_gpu : gpu];
}
}  // namespace

c10::Allocator* gpu_memory() { return &memory; }

void launch(c10::Device device) {
  const int gpu = device.index();
  kernels[gpu]++;
  if (!is_recording) return;
  std::lock_guard<std::mutex> guard(launches_lock);
  launches[{syscall(SYS_gettid), current_gpu, gpu}]++;
}

c10::Device resolved(std::optional<c10::Device> device) {
  if (!device || !device->has_index()) return c10::Device(kGpu, current_gpu);
  check_ordinal(device->index());
  return *device;
}

at::Tensor host(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  if (!tensor.storage().nbytes()) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  at::Storage keep = tensor.storage();
  return at::for_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes())
      .strides(tensor.strides())
      .deleter([keep](void*) mutable { keep = at::Storage(); })
      .options(options)
      .make_tensor();
}

at::Generator host_generator(const at::Generator& generator) {
  return static_cast<GpuGenerator*>(generator.unsafeGetGeneratorImpl())->cpu;
}
}  // namespace simcuda

// torch asks the registry for a class of this name once, when libtorch_cpu is first used: so this is loaded before torch.
struct CUDAHooks final : public at::CUDAHooksInterface {
  CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex gpu) const override { return simcuda::default_generator(gpu); }
  at::Generator getNewGenerator(c10::DeviceIndex gpu) const override {
    return at::make_generator<simcuda::GpuGenerator>(at::detail::createCPUGenerator(), gpu < 0 ? simcuda::current_gpu : gpu);
  }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(simcuda::num_gpus); }
  int getNumGPUs() const override { return simcuda::num_gpus; }
  c10::DeviceIndex current_device() const override { return simcuda::current_gpu; }
  void setCurrentDevice(c10::DeviceIndex gpu) const override { simcuda::current_gpu = gpu; }
  c10::DeviceIndex getCurrentDevice() const override { return simcuda::current_gpu; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex gpu) const override {
    auto before = simcuda::current_gpu;
    if (gpu >= 0) simcuda::current_gpu = gpu;
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex gpu) const override { return exchangeDevice(gpu); }
  bool isPinnedPtr(const void* data) const override { return simcuda::is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &simcuda::pinned_memory; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &simcuda::memory; }
  c10::Device getDeviceFromPtr(void* data) const override {
    std::lock_guard<std::mutex> guard(simcuda::blocks_lock);
    auto found = simcuda::blocks.find(data);
    return c10::Device(simcuda::kGpu, found == simcuda::blocks.end() ? simcuda::current_gpu : found->second.gpu);
  }
  void deviceSynchronize(c10::DeviceIndex) const override {}
};

namespace at {
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at

void add_nccl(py::module& module);

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace simcuda;
  c10::SetAllocator(kGpu, &memory, 255);
  add_nccl(module);
  module.def("set_num_gpus", [](int gpus) { num_gpus = gpus; });
  module.def("set_own_checks", [](std::vector<std::string> names) { own_checks = {names.begin(), names.end()}; });
  module.def("set_strict", [](bool on) { strict = on; });
  module.def("set_limit", [](int gpu, int64_t bytes) { limit[gpu] = bytes; });
  module.def("limit", [](int gpu) { return limit[gpu].load(); });
  module.def("allocated", [](int gpu) { return allocated[gpu].load(); });
  module.def("peak", [](int gpu) { return peak[gpu].load(); });
  module.def("reset_peak", [](int gpu) { peak[gpu] = allocated[gpu].load(); });
  module.def("kernels", [](int gpu) { return kernels[gpu].load(); });
  module.def("current_device", [] { return static_cast<int>(current_gpu); });
  module.def("set_device", [](int gpu) {
    check_ordinal(gpu);
    if (gpu >= 0) current_gpu = gpu;
  });
  module.def("new_stream", [] { return ++num_streams; });
  module.def("current_stream", [](int gpu) { return current_stream[gpu]; });
  module.def("set_stream", [](int gpu, c10::StreamId stream) { current_stream[gpu] = stream; });
  module.def("default_generator", [](int gpu) { return default_generator(gpu); });
  module.def("record_launches", [](bool on) {
    is_recording = on;
    if (on) {
      std::lock_guard<std::mutex> guard(launches_lock);
      launches.clear();
    }
  });
  module.def("launches", [] {
    std::lock_guard<std::mutex> guard(launches_lock);
    return launches;
  });
  module.def("resize_storage", [](at::Tensor bytes_of, int64_t bytes) {
    auto* storage = bytes_of.storage().unsafeGetStorageImpl();
    OnGpu gpu(bytes_of.device());
    auto fresh = memory.allocate(bytes);
    if (bytes && storage->nbytes()) std::memcpy(fresh.get(), storage->data(), std::min<int64_t>(bytes, storage->nbytes()));
    storage->set_data_ptr_noswap(std::move(fresh));
    storage->set_nbytes(bytes);
  });
}
