// What the GPUs, their operators and the bindings share.
#pragma once
#include <ATen/ATen.h>
#include <c10/core/Allocator.h>
#include <string>
#include <unordered_set>

namespace simcuda {
constexpr int kMaxGpus = 16;
constexpr c10::DeviceType kGpu = c10::DeviceType::CUDA;

extern int num_gpus;
extern bool strict;                                      // refuse tensors of several devices in one operator, as CUDA does
extern std::unordered_set<std::string> own_checks;       // operators that check devices themselves and take host scalars
extern thread_local c10::DeviceIndex current_gpu;        // as cudaSetDevice: each thread starts at 0

c10::Allocator* gpu_memory();

// Counts one kernel on `device`.
void launch(c10::Device device);

// The device with its index; without one: the current GPU.
c10::Device resolved(std::optional<c10::Device> device);

// A CPU tensor over the memory of `tensor`.
at::Tensor host(const at::Tensor& tensor);

// The CPU generator that draws the numbers of a GPU's `generator`.
at::Generator host_generator(const at::Generator& generator);

// Makes a GPU the current one until the end of the scope.
struct OnGpu {
  c10::DeviceIndex before;
  explicit OnGpu(c10::Device device) : before(current_gpu) { current_gpu = device.index(); }
  ~OnGpu() { current_gpu = before; }
};
}  // namespace simcuda
