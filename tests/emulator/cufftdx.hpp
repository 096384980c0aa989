// Enough of CUDA and of cuFFTDx to run flashmel/kernel on a CPU: a thread a CUDA thread, a barrier a __syncthreads.
// The transform is a plain float64 sum. What this cannot show: registers, bank conflicts, alignment faults.
#pragma once
#include <barrier>
#include <cmath>
#include <complex>
#include <cstdint>
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
template <class T> T min(T a, T b) { return b < a ? b : a; }

inline thread_local Dim threadIdx, blockIdx;
inline Dim gridDim;
inline std::barrier<>* block_barrier;
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

namespace cufftdx {
enum class fft_type { c2c };
enum class fft_direction { forward };
template <int n> struct Size { static constexpr int size = n; };
template <class> struct Precision {};
template <fft_type> struct Type {};
template <fft_direction> struct Direction {};
struct Thread {};
template <int> struct SM {};
template <class T> struct complex { T x, y; };
template <int n> struct Transform {
  using value_type = complex<float>;
  void execute(value_type* a) const {
    std::vector<std::complex<double>> out(n);
    for (int k = 0; k < n; ++k)
      for (int j = 0; j < n; ++j) out[k] += std::complex<double>(a[j].x, a[j].y) * std::polar(1.0, -2 * M_PI * j * k / n);
    for (int k = 0; k < n; ++k) a[k] = {float(out[k].real()), float(out[k].imag())};
  }
};
template <int n, class T> Transform<n> operator+(Size<n>, T);
template <int n, class T> Transform<n> operator+(Transform<n>, T);
}  // namespace cufftdx
