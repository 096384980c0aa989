// Features over time, in a launch after the one that made them: a floor below a row's maximum; mean and variance of each feature.
//
// Each row depends on its own frames alone, which are added up in an order that only their number decides.
#include "device.cuh"
#include "epilogue.cuh"

enum class Kind { maximum, mean, variance };

#include "config.h"
#include "rows.cuh"

// Run-time arguments. driver.py packs the same fields in the same order.
struct Params {
  const void* features;      // (rows, n_mels, frames), or (rows, frames, n_mels) where they are time_major; contiguous
  void* out;                 // likewise; may be the same
  const float* maxima;       // (rows, n_maxima): for Kind::maximum, in place of a look at the features
  const long long* lengths;  // (rows,): samples of each row, where it is `ragged`
  long long n_samples, frames, n_maxima;
  unsigned rows, group;  // group: neighbouring rows that have one maximum
  int n_mels;
};

using Input = Config::Input;
using Output = Config::Output;

// Over all threads of the block; `combine` is associative and commutative.
template <class Combine>
__device__ inline float over_block(float value, float nothing, float* shared, Combine combine) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value = combine(value, __shfl_xor_sync(0xffffffffu, value, offset));
  __syncthreads();  // shared[] may hold what an earlier call left
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  value = threadIdx.x % 32 < blockDim.x / 32 ? shared[threadIdx.x % 32] : nothing;
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value = combine(value, __shfl_xor_sync(0xffffffffu, value, offset));
  return value;
}

// Blocks (x, row): each takes parts of the row. Only what lies below the floor is written, for the output is the input.
__device__ inline void raise_to_floor(const Params& params, unsigned row, float* shared) {
  const long long first = row / params.group * params.group * params.n_maxima, count = params.group * params.n_maxima;
  float top = lowest;
  for (long long i = threadIdx.x; i < count; i += blockDim.x) top = larger(top, params.maxima[first + i]);
  const float floor = over_block(top, lowest, shared, [](float a, float b) { return larger(a, b); }) - Config::range;
  const long long elements = params.n_mels * params.frames, step = (long long)gridDim.x * blockDim.x;
  const long long valid = row_frames<Config>(params, row);
  Output* const out = static_cast<Output*>(params.out) + row * elements;
  constexpr int at_once = 8;
#pragma unroll 1
  for (long long i0 = blockIdx.x * blockDim.x + threadIdx.x; i0 < elements; i0 += at_once * step) {
    float value[at_once];
#pragma unroll
    for (int n = 0; n < at_once; ++n) value[n] = i0 + n * step < elements ? to_float(out[i0 + n * step]) : 0.0f;
#pragma unroll
    for (int n = 0; n < at_once; ++n) {
      const long long i = i0 + n * step;
      bool below = !(value[n] >= floor) && i < elements;  // NaN everywhere, if it is the maximum
      if constexpr (Config::has_padding) below = below && (Config::time_major ? i / params.n_mels : i % params.frames) < valid;
      if (below) out[i] = from_float<Output>(value[n] != value[n] ? value[n] : floor);
    }
  }
}

// Blocks (x, row): each takes `together` neighbouring features of the row.
__device__ inline void standardize(const Params& params, unsigned row, float* shared) {
  constexpr int together = Config::time_major ? 8 : 1;
  const int slot = threadIdx.x % together, lanes = blockDim.x / together, lane = threadIdx.x / together;
  const int m = blockIdx.x * together + slot;
  const long long valid = row_frames<Config>(params, row), stride = Config::time_major ? params.n_mels : 1;
  const long long start = (long long)row * params.n_mels * params.frames + (Config::time_major ? m : m * params.frames);
  const Input* const x = static_cast<const Input*>(params.features) + start;
  Output* const y = static_cast<Output*>(params.out) + start;
  const bool exists = m < params.n_mels;
  const auto total = [&](auto term) {  // of the valid frames; eight sums in a thread, for accuracy and to have loads under way
    float part[8] = {};
    if (exists) {
#pragma unroll 1
      for (long long t0 = lane; t0 < valid; t0 += 8 * lanes) {
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          const long long t = t0 + n * lanes;
          if (t < valid) part[n] += term(to_float(x[t * stride]));
        }
      }
    }
    float sum = ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
    // Over the threads of the same feature.
    __syncthreads();
    shared[threadIdx.x] = sum;
    __syncthreads();
#pragma unroll 1
    for (int half = lanes / 2; half > 0; half /= 2) {
      if (lane < half) shared[threadIdx.x] += shared[threadIdx.x + half * together];
      __syncthreads();
    }
    return shared[slot];
  };
  const auto at_least_one = [](long long n) { return float(n > 1 ? n : 1); };
  const float mean = total([](float value) { return value; }) / at_least_one(valid);
  float factor = Config::gain;
  if constexpr (Config::kind == Kind::variance) {
    const float variance = total([&](float value) { return (value - mean) * (value - mean); }) / at_least_one(valid - Config::ddof);
    if constexpr (Config::eps_of_variance) {
      factor = Config::gain / sqrtf(variance + Config::eps);
    } else {
      factor = variance == 0.0f ? 0.0f : Config::gain / (sqrtf(variance) + Config::eps);
    }
  }
  if (!exists) return;
#pragma unroll 8
  for (long long t = lane; t < params.frames; t += lanes) {
    const float value = t < valid ? (to_float(x[t * stride]) - mean) * factor + Config::bias : Config::pad_value;
    y[t * stride] = from_float<Output>(value);
  }
}

extern "C" __global__ void __launch_bounds__(1024) normalize(const __grid_constant__ Params params) {
  extern __shared__ float4 shared_memory[];
  float* const shared = reinterpret_cast<float*>(shared_memory);  // one each thread
#pragma unroll 1
  for (unsigned row = blockIdx.y; row < params.rows; row += gridDim.y) {
    if constexpr (Config::kind == Kind::maximum) {
      raise_to_floor(params, row, shared);
    } else {
      standardize(params, row, shared);
    }
    __syncthreads();
  }
}
