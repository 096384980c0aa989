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
  const void* features;      // (rows, n_mels, frames) or, time_major, (rows, frames, n_mels), contiguous; not for Kind::maximum
  void* out;                 // likewise, and may be the same
  const float2* summary;     // what forward.cu left of valid features: extremes for Kind::maximum, else moments
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
  const float2* const extremes = params.summary + row / params.group * params.group * per_row;
  float top = lowest;
  for (long long i = threadIdx.x; i < params.group * per_row; i += blockDim.x) top = larger(top, extremes[i].x);
  const float floor = over_block(top, lowest, shared, [](float a, float b) { return larger(a, b); }) - Config::range;
  const long long valid = row_frames<Config>(params, row);
  Output* const out = static_cast<Output*>(params.out) + (long long)row * params.n_mels * params.frames;
#pragma unroll 1
  for (int tile = blockIdx.x; tile < params.tiles; tile += gridDim.x) {
    const float2* const own = params.summary + row * per_row + (long long)tile * params.warps;
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

// Blocks (x, row): each takes `together` neighbouring features, in a part of the row's frames.
__device__ inline void standardize(const Params& params, unsigned row, float* shared) {
  constexpr int together = Config::together, at_once = 8;
  const int groups = (params.n_mels + together - 1) / together, m0 = int(blockIdx.x) % groups * together;
  const int valid = int(row_frames<Config>(params, row)), frames = int(params.frames);

  // Mean and factor of each feature, from the moments of its tiles: threads are features first.
  const int slot = threadIdx.x % together, lane = threadIdx.x / together, lanes = blockDim.x / together;
  const bool exists = m0 + slot < params.n_mels;
  const int tiles = exists ? (valid + params.frames_per_tile - 1) / params.frames_per_tile : 0;
  const float2* const moments = params.summary + (long long)row * params.tiles * params.n_mels + m0 + slot;
  const auto total = [&](auto term) {
    float sum = 0.0f;
#pragma unroll 4
    for (int tile = lane; tile < tiles; tile += lanes) {
      sum += term(moments[(long long)tile * params.n_mels], float(min(valid - tile * params.frames_per_tile, params.frames_per_tile)));
    }
#pragma unroll
    for (int offset = together; offset < 32; offset *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    __syncthreads();  // shared[] may hold what an earlier call left
    if (threadIdx.x % 32 < together) shared[threadIdx.x / 32 * together + slot] = sum;
    __syncthreads();
    sum = 0.0f;
    for (int warp = 0; warp < blockDim.x / 32; ++warp) sum += shared[warp * together + slot];
    return sum;
  };
  const auto at_least_one = [](int n) { return float(n > 1 ? n : 1); };
  const float first = tiles > 0 ? moments->x : 0.0f;  // subtracted, so that what stands still has a variance of 0
  float mean = first + total([&](float2 tile, float n) { return n * (tile.x - first); }) / at_least_one(valid);
  float factor = Config::gain;
  if constexpr (Config::kind == Kind::variance) {
    const float squares = total([&](float2 tile, float n) { return tile.y + n * (tile.x - mean) * (tile.x - mean); });
    const float variance = squares / at_least_one(valid - Config::ddof);
    if constexpr (Config::eps_of_variance) {
      factor = Config::gain / sqrtf(variance + Config::eps);
    } else {
      factor = variance == 0.0f ? 0.0f : Config::gain / (sqrtf(variance) + Config::eps);
    }
  }

  // Threads are features first where features lie side by side; else a warp has a feature.
  const int own = Config::time_major ? slot : threadIdx.x / 32, begin = Config::time_major ? lane : threadIdx.x % 32;
  const int step = Config::time_major ? lanes : 32;
  if constexpr (!Config::time_major) {
    static_assert(Config::block_threads == 32 * together);
    __syncthreads();
    if (lane == 0) shared[slot] = mean, shared[together + slot] = factor;
    __syncthreads();
    mean = shared[own], factor = shared[together + own];
  }
  if (m0 + own >= params.n_mels) return;
  const long long place = (long long)row * params.n_mels * frames + (Config::time_major ? m0 + own : (m0 + own) * (long long)frames);
  const int stride = Config::time_major ? params.n_mels : 1;
  const Input* const x = static_cast<const Input*>(params.features) + place;
  Output* const y = static_cast<Output*>(params.out) + place;
  const int parts = int(gridDim.x) / groups, part = int(blockIdx.x) / groups, length = (frames + parts - 1) / parts;
  const int end = min(frames, (part + 1) * length);
#pragma unroll 1
  for (int t0 = part * length + begin; t0 < end; t0 += at_once * step) {
    float value[at_once];  // loads under way: none of them may wait for a store
#pragma unroll
    for (int n = 0; n < at_once; ++n) {
      const int t = t0 + n * step;
      value[n] = t < min(end, valid) ? (to_float(x[(long long)t * stride]) - mean) * factor + Config::bias : Config::pad_value;
    }
#pragma unroll
    for (int n = 0; n < at_once; ++n) {
      if (t0 + n * step < end) y[(long long)(t0 + n * step) * stride] = from_float<Output>(value[n]);
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
