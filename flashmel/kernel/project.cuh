// Stage 3: mel filters times powers. Eight lanes of a warp share a filter, so a warp takes four neighbouring filters, of
// much the same length, at a time. A lane takes up to four frames (one 16-byte read for each bin); where the tile has
// fewer than 32 frames, the lanes left over take every second, fourth or eighth bin. In a round a lane takes two bins; the
// host fills each filter up to whole rounds with zero weights, and the powers end in as many zero bins.
#pragma once

template <class Config>
struct Projection {
  static constexpr int frames = Config::frames_per_block;
  static constexpr int frames_per_lane = frames < 4 ? frames : 4;
  static constexpr int groups = frames / frames_per_lane;  // of frames
  static constexpr int lanes = 8;                          // a filter
  static constexpr int slices = Config::bin_slices;        // lanes / groups: of a filter's bins
  static constexpr int step = Config::threads / lanes;     // filters at a time in the block

  // Powers are stored bin by bin, the frames of a bin in this order: a lane's frames side by side, and the lanes of a
  // store on consecutive frames.
  __device__ static constexpr int place(int frame) { return frame % groups * frames_per_lane + frame / groups; }
};

template <class Config>
__device__ inline void project(const Params& params, const float* powers) {
  using P = Projection<Config>;
  using Output = typename Config::Output;
  struct alignas(4 * P::frames_per_lane) Powers {
    float of_frame[P::frames_per_lane];
  };
  const int lane = threadIdx.x % P::lanes, group = lane % P::groups, slice = lane / P::groups;
  const Powers* power = reinterpret_cast<const Powers*>(powers) + group;
  const long long t = block_first_frame<Config>() + group;
  int m = threadIdx.x / P::lanes;
  Output* mel = static_cast<Output*>(params.mel) + (block_row() * params.n_mels + m) * params.frames + t;
  const int stored = slice == 0 ? int(min(params.frames - t, (long long)P::frames)) : 0;

  // First bin, rounds, first weight; the first filter's arrive while the block waits for the powers.
  int4 filter = m < params.n_mels ? params.filters[m] : make_int4(0, 0, 0, 0);
  __syncthreads();
  // Every lane goes round as often as the warp's first: the shuffles need all of them.
  while (m / 4 * 4 < params.n_mels) {
    const bool exists = m < params.n_mels;
    const float2* weights = reinterpret_cast<const float2*>(params.weights + filter.z) + slice;
    const Powers* bin = power + (filter.x + slice) * P::groups;
    float sum[P::frames_per_lane] = {};
    for (int round = 0; round < filter.y; ++round, weights += P::slices, bin += 2 * P::lanes) {
      const float2 weight = *weights;
      const Powers a = bin[0], b = bin[P::lanes];
#pragma unroll
      for (int v = 0; v < P::frames_per_lane; ++v) sum[v] += weight.x * a.of_frame[v] + weight.y * b.of_frame[v];
    }
#pragma unroll
    for (int v = 0; v < P::frames_per_lane; ++v) {
#pragma unroll
      for (int offset = P::groups; offset < P::lanes; offset *= 2) sum[v] += __shfl_xor_sync(0xffffffffu, sum[v], offset);
      if (exists && v * P::groups < stored) mel[v * P::groups] = from_float<Output>(sum[v]);
    }
    m += P::step;
    mel += P::step * params.frames;
    filter = m < params.n_mels ? params.filters[m] : make_int4(0, 0, 0, 0);
  }
}
