// Enough of CUDA to run flashmel/kernel on a CPU, a thread a CUDA thread; in the place of kernel/device.cuh.
// What this cannot show: registers, bank conflicts.
#pragma once
#include <barrier>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__

struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };
struct Dim { unsigned x, y, z; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned long long)a * b >> 32; }
template <class T> T min(T a, T b) { return b < a ? b : a; }
template <class T> T max(T a, T b) { return a < b ? b : a; }

inline thread_local Dim threadIdx, blockIdx;
inline Dim gridDim, blockDim;
inline std::barrier<>* block_barrier;
inline std::vector<std::unique_ptr<std::barrier<>>> team_barriers;
inline std::vector<std::unique_ptr<std::barrier<>>> warp_barriers;
inline std::vector<float> shuffle_values;
inline void __syncthreads() { block_barrier->arrive_and_wait(); }
inline float __shfl_xor_sync(unsigned, float value, int offset) {
  std::barrier<>& warp = *warp_barriers[threadIdx.x / 32];
  shuffle_values[threadIdx.x] = value;
  warp.arrive_and_wait();
  const float other = shuffle_values[threadIdx.x ^ offset];
  warp.arrive_and_wait();
  return other;
}
inline float __shfl_sync(unsigned, float value, int lane, int width) {
  std::barrier<>& warp = *warp_barriers[threadIdx.x / 32];
  shuffle_values[threadIdx.x] = value;
  warp.arrive_and_wait();
  const float other = shuffle_values[threadIdx.x / width * width + lane];
  warp.arrive_and_wait();
  return other;
}

using std::fmaf;
inline int thread_index() { return threadIdx.x; }
inline int opaque(int value) { return value; }
inline void settle(float&) {}
inline void named_barrier(int id, int) { team_barriers[id]->arrive_and_wait(); }
template <int bytes>
inline void copy_async(void* shared, const void* global) {
  if (reinterpret_cast<uintptr_t>(shared) % bytes || reinterpret_cast<uintptr_t>(global) % bytes) std::abort();
  std::memcpy(shared, global, bytes);
}
inline void wait_for_copies() {}
inline float inverse_root(float x) { return 1.0f / std::sqrt(x); }
inline float log2_of_normal(float x) { return std::log2(x); }
inline float half_to_float(unsigned short bits) { return std::bit_cast<_Float16>(bits); }
inline unsigned short float_to_half(float value) { return std::bit_cast<unsigned short>(_Float16(value)); }
inline float float_of_bits(unsigned bits) { return std::bit_cast<float>(bits); }
inline unsigned bits_of_float(float value) { return std::bit_cast<unsigned>(value); }
