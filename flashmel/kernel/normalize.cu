// Features over time, in a launch after the one that made them: a floor below a row's maximum; mean and variance of each feature.
//
// Each row depends on its own frames alone, which are added up in an order that only their number decides.
#include "device.cuh"
#include "numbers.cuh"

enum class Kind { maximum, mean, variance };

#include "config.h"
#include "rows.cuh"

// Run-time arguments. driver.py packs the same fields in the same order.
struct Params {
  const void* features;      // (rows, n_mels, frames), contiguous; not for Kind::maximum
  void* out;                 // likewise, or (rows, frames, n_mels) where it is time_major
  const float2* extremes;    // (rows, tiles, warps): largest and smallest valid feature; for Kind::maximum
  const long long* lengths;  // (rows,): samples of each row, where it is `ragged`
  long long n_samples, frames;
  unsigned rows, group;  // group: neighbouring rows that have one maximum
  int n_mels, tiles, warps, frames_per_tile;
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

// Blocks (x, row): each takes tiles of the row. In place; a tile without anything below the floor is not even read.
__device__ inline void raise_to_floor(const Params& params, unsigned row, float* shared) {
  const long long per_row = (long long)params.tiles * params.warps;
  const float2* const extremes = params.extremes + row / params.group * params.group * per_row;
  float top = lowest;
  for (long long i = threadIdx.x; i < params.group * per_row; i += blockDim.x) top = larger(top, extremes[i].x);
  const float floor = over_block(top, lowest, shared, [](float a, float b) { return larger(a, b); }) - Config::range;
  const long long valid = row_frames<Config>(params, row);
  Output* const out = static_cast<Output*>(params.out) + row * params.n_mels * params.frames;
#pragma unroll 1
  for (int tile = blockIdx.x; tile < params.tiles; tile += gridDim.x) {
    const float2* const own = params.extremes + row * per_row + (long long)tile * params.warps;
    bool below = false;
    for (int i = 0; i < params.warps; ++i) below = below || !(own[i].y >= floor);  // NaN everywhere, if it is the maximum
    if (!below) continue;
    const long long t0 = (long long)tile * params.frames_per_tile;
    const int frames = int(max(0ll, min(valid - t0, (long long)params.frames_per_tile))), count = frames * params.n_mels;
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
      Output* const at = Config::time_major ? out + t0 * params.n_mels + i : out + i / frames * params.frames + t0 + i % frames;
      const float value = to_float(*at);
      if (value < floor || floor != floor) *at = from_float<Output>(floor);
    }
  }
}

// Blocks (x, row): each takes `together` neighbouring features of the row, which is (n_mels, frames) here whatever the output is.
__device__ inline void standardize(const Params& params, unsigned row, float* shared) {
  constexpr int together = Config::together, at_once = 8;
  const int lanes = blockDim.x / together, slot = threadIdx.x / lanes, lane = threadIdx.x % lanes, m0 = blockIdx.x * together;
  const int valid = int(row_frames<Config>(params, row)), frames = int(params.frames);
  const Input* const features = static_cast<const Input*>(params.features) + ((long long)row * params.n_mels + m0) * params.frames;
  const bool exists = m0 + slot < params.n_mels;
  const Input* const x = features + slot * params.frames;
  const auto total = [&](auto term) {  // over the valid frames of the thread's feature; in eight parts a thread, for accuracy
    float part[at_once] = {};
#pragma unroll 1
    for (int t0 = lane; t0 < valid; t0 += at_once * lanes) {
      float value[at_once];
#pragma unroll
      for (int n = 0; n < at_once; ++n) value[n] = exists && t0 + n * lanes < valid ? to_float(x[t0 + n * lanes]) : 0.0f;
#pragma unroll
      for (int n = 0; n < at_once; ++n) part[n] += t0 + n * lanes < valid ? term(value[n]) : 0.0f;
    }
    float sum = ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    __syncthreads();  // shared[] may hold what an earlier call left
    if (lane % 32 == 0) shared[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0.0f;
    for (int warp = 0; warp < lanes / 32; ++warp) sum += shared[slot * (lanes / 32) + warp];
    return sum;
  };
  const auto at_least_one = [](int n) { return float(n > 1 ? n : 1); };
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
  const auto made = [&](float value, float mean, float factor) { return from_float<Output>((value - mean) * factor + Config::bias); };
  const Output nothing = from_float<Output>(Config::pad_value);
  if constexpr (!Config::time_major) {
    Output* const y = static_cast<Output*>(params.out) + ((long long)row * params.n_mels + m0 + slot) * params.frames;
    if (!exists) return;
#pragma unroll 8
    for (int t = lane; t < frames; t += lanes) y[t] = t < valid ? made(to_float(x[t]), mean, factor) : nothing;
  } else {  // a thread has whole frames
    __syncthreads();
    if (lane == 0) shared[2 * slot] = mean, shared[2 * slot + 1] = factor;
    __syncthreads();
    struct alignas(together * sizeof(Output)) Outputs {
      Output of[together];
    };
    Output* const y = static_cast<Output*>(params.out) + (long long)row * params.frames * params.n_mels + m0;
#pragma unroll 4
    for (int t = threadIdx.x; t < frames; t += blockDim.x) {
      Outputs outputs;
#pragma unroll
      for (int n = 0; n < together; ++n) {
        const bool there = t < valid && m0 + n < params.n_mels;
        outputs.of[n] = there ? made(to_float(features[n * params.frames + t]), shared[2 * n], shared[2 * n + 1]) : nothing;
      }
      if (params.n_mels % together == 0) {
        *reinterpret_cast<Outputs*>(y + (long long)t * params.n_mels) = outputs;
      } else {
        for (int n = 0; n < together && m0 + n < params.n_mels; ++n) y[(long long)t * params.n_mels + n] = outputs.of[n];
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(Config::block_threads) normalize(const __grid_constant__ Params params) {
  extern __shared__ float4 shared_memory[];
  float* const shared = reinterpret_cast<float*>(shared_memory);
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
