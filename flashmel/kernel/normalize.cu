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
  const void* features;      // (rows, n_mels, frames), or (rows, frames, n_mels) where they are time_major; contiguous
  void* out;                 // likewise; may be the same
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

// Blocks (x, row): each takes `together` neighbouring features of the row.
__device__ inline void standardize(const Params& params, unsigned row, float* shared) {
  constexpr int together = Config::time_major ? 8 : 1, at_once = 8;
  const int slot = threadIdx.x % together, lane = threadIdx.x / together;
  const int m = blockIdx.x * together + slot, lanes = blockDim.x / together;
  const int valid = int(row_frames<Config>(params, row)), frames = int(params.frames);
  const bool exists = m < params.n_mels;
  const long long stride = Config::time_major ? params.n_mels : 1;
  const long long start = (long long)row * params.n_mels * params.frames + (Config::time_major ? m : m * params.frames);
  const Input* const x = static_cast<const Input*>(params.features) + start;
  Output* const y = static_cast<Output*>(params.out) + start;
  // visit(t, x[t]) of the thread's frames below `end`; all loads of a round are under way together, none waits for a store.
  const auto each = [&](int end, auto visit) {
#pragma unroll 1
    for (int t0 = lane; t0 < end; t0 += at_once * lanes) {
      float value[at_once];
#pragma unroll
      for (int n = 0; n < at_once; ++n) value[n] = exists && t0 + n * lanes < valid ? to_float(x[(t0 + n * lanes) * stride]) : 0.0f;
#pragma unroll
      for (int n = 0; n < at_once; ++n) {
        if (t0 + n * lanes < end) visit(n, t0 + n * lanes, value[n]);
      }
    }
  };
  const auto total = [&](auto term) {  // over the valid frames; in eight parts a thread, for accuracy
    float part[at_once] = {};
    each(valid, [&](int n, int, float value) { part[n] += term(value); });
    float sum = ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
#pragma unroll
    for (int offset = 16; offset >= together; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    __syncthreads();  // shared[] may hold what an earlier call left
    if (threadIdx.x % 32 < together) shared[threadIdx.x / 32 * together + threadIdx.x % 32] = sum;
    __syncthreads();
    sum = 0.0f;
    for (int warp = 0; warp < int(blockDim.x) / 32; ++warp) sum += shared[warp * together + slot];
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
  if (!exists) return;
  each(frames, [&](int, int t, float value) {
    y[t * stride] = from_float<Output>(t < valid ? (value - mean) * factor + Config::bias : Config::pad_value);
  });
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
