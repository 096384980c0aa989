// Stage 3: mel filters times powers. A warp takes four neighbouring filters at a time, eight lanes each. A lane takes up to
// four frames (one 16-byte read for each bin); where the tile has fewer than 32 frames, the lanes left over take every
// second, fourth or eighth bin, and add up in the end. In a round a lane takes two bins. The host gives the four filters
// equally many rounds, filled up with zero weights, and the powers end in as many zero bins as one round has.
#pragma once

template <class Config>
struct Projection {
  static constexpr int frames = Config::frames_per_tile;
  static constexpr int frames_per_lane = frames < 4 ? frames : 4;
  static constexpr int groups = frames / frames_per_lane;  // of frames
  static constexpr int lanes = 8;                          // a filter
  static constexpr int slices = Config::bin_slices;        // lanes / groups: of a filter's bins
  static constexpr int step = Config::threads / lanes;     // filters at a time in the team

  // Powers are stored bin by bin, the frames of a bin in this order: a lane's frames side by side, and the lanes of a
  // store on consecutive frames.
  __device__ static constexpr int place(int frame) { return frame % groups * frames_per_lane + frame / groups; }
};

// Add up the sums of a filter's slices, lanes `offset`, 2 * offset, ... apart. While a lane has several frames, each of two
// lanes keeps half of them.
template <int held, int offset, int lanes>
__device__ inline void add_slices(float* sum, int lane) {
  if constexpr (offset < lanes) {
    constexpr int kept = held > 1 ? held / 2 : 1;
    const bool upper = lane & offset;
#pragma unroll
    for (int v = 0; v < kept; ++v) {
      const float lower_half = sum[v], upper_half = sum[held > 1 ? v + kept : v];
      sum[v] = (upper ? upper_half : lower_half) + __shfl_xor_sync(0xffffffffu, upper ? lower_half : upper_half, offset);
    }
    add_slices<kept, 2 * offset, lanes>(sum, lane);
  }
}

// Mean, and sum of squared distances from it, of those values of `lanes` neighbouring lanes that count; `one_of` is 1 / their
// number. The first lane's first value is subtracted from all: where they are equal, the mean is that and the sum 0.
template <int held, int lanes, class Counts>
__device__ inline float2 moments(const float* value, float one_of, Counts counts) {
  const auto over_lanes = [&](auto term) {
    float sum = 0.0f;
#pragma unroll
    for (int v = 0; v < held; ++v) sum += counts(v) ? term(value[v]) : 0.0f;
#pragma unroll
    for (int offset = 1; offset < lanes; offset *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    return sum;
  };
  const float first = __shfl_sync(0xffffffffu, value[0], 0, lanes);
  const float mean = one_of * over_lanes([&](float x) { return x - first; });
  const float squares = over_lanes([&](float x) { return (x - first - mean) * (x - first - mean); });
  return make_float2(first + mean, squares);
}

template <class Config>
__device__ inline void project(const Params& params, const Tile& tile, const float* powers, const int4* filters) {
  using P = Projection<Config>;
  using Output = typename Config::Output;
  struct alignas(4 * P::frames_per_lane) Powers {
    float of_frame[P::frames_per_lane];
  };
  const int thread = Place<Config>().thread;
  const int lane = thread % P::lanes, group = lane % P::groups, slice = lane / P::groups;
  const Powers* power = reinterpret_cast<const Powers*>(powers) + opaque(slice * P::groups + group);
  const float2* weights = reinterpret_cast<const float2*>(filters + params.n_filters) + slice;

  // The frames that the lane stores: after add_slices, its share of those that it summed.
  constexpr int left = P::frames_per_lane > P::slices ? P::frames_per_lane / P::slices : 1;
  int first = 0, held = P::frames_per_lane;
  bool stores = true;
#pragma unroll
  for (int offset = P::groups; offset < P::lanes; offset *= 2) {
    const bool upper = lane & offset;
    stores = stores && !(held == 1 && upper);  // else the lane below has the same sum
    held /= 2;
    first += upper ? held : 0;
    held = held > 1 ? held : 1;
  }
  const long long t = tile.first_frame(params) + first * P::groups + group;
  const int stored = stores ? int(min(params.frames - t, (long long)P::frames)) : 0;
  const bool all_stored = stored > (left - 1) * P::groups;
  // From a frame, and from a filter, to the next.
  const auto frame_stride = [&] { return Config::time_major ? params.n_mels : 1; };
  const auto filter_stride = [&] { return Config::time_major ? 1ll : params.frames; };
  Output* const mel =
      static_cast<Output*>(params.mel) + (long long)tile.row(params) * params.n_mels * params.frames + t * frame_stride();
  int valid = stored;  // of these, those that do not hold the pad value
  if constexpr (Config::has_padding) {
    valid = int(max(0ll, min(row_frames<Config>(params, tile.row(params)) - t, (long long)P::frames)));
  }

  const auto counts = [&](int v) { return v * P::groups < min(valid, stored); };
  float top = lowest, bottom = highest, one_of_frames = 0.0f;
  if constexpr (Config::moments) {  // 1 / valid frames of the tile
    const long long left_of_row = min(params.frames, row_frames<Config>(params, tile.row(params))) - tile.first_frame(params);
    one_of_frames = 1.0f / float(max(1ll, min(left_of_row, (long long)P::frames)));
  }
  for (int i = thread / P::lanes; i < params.n_filters; i += P::step) {
    const int4 filter = filters[i];
    const float2* weight = weights + filter.z;
    const Powers* bin = power + filter.x;
    float sum[P::frames_per_lane] = {};
    int rounds = filter.y;
    do {  // in blocks: one long sum would round as often as it has bins
      float part[P::frames_per_lane] = {};
      int block = min(rounds, 16);
      rounds -= block;
#pragma unroll 1
      do {
        const float2 w = *weight;
        const Powers a = bin[0], b = bin[P::lanes];
#pragma unroll
        for (int v = 0; v < P::frames_per_lane; ++v) {
          part[v] += w.x * a.of_frame[v];
          part[v] += w.y * b.of_frame[v];
        }
        weight += 4 * P::slices;
        bin += 2 * P::lanes;
      } while (--block > 0);
#pragma unroll
      for (int v = 0; v < P::frames_per_lane; ++v) sum[v] += part[v];
    } while (rounds > 0);
    add_slices<P::frames_per_lane, P::groups, P::lanes>(sum, lane);
    const bool exists = filter.w < params.n_mels;
    if (!Config::moments && !exists) continue;
    float gain = 1.0f, bias = 0.0f;
    if constexpr (Config::affine) {
      if (exists) gain = params.affine[filter.w], bias = params.affine[params.n_mels + filter.w];
    }
#pragma unroll
    for (int v = 0; v < left; ++v) {
      sum[v] = feature<Config>(sum[v]);
      if constexpr (Config::affine) sum[v] = fmaf(gain, sum[v], bias);
      if constexpr (Config::extremes) {
        if (counts(v)) top = larger(top, sum[v]), bottom = -larger(-bottom, -sum[v]);
      }
    }
    if constexpr (Config::moments) {
      const float2 found = moments<left, P::lanes>(sum, one_of_frames, counts);
      if (!exists) continue;
      if (lane == 0) params.summary[(long long)tile.index * params.n_mels + filter.w] = found;
    }
    if constexpr (Config::has_padding) {
#pragma unroll
      for (int v = 0; v < left; ++v) sum[v] = v * P::groups < valid ? sum[v] : Config::pad_value;
    }
    Output* const to = mel + filter.w * filter_stride();
    if (all_stored) {
#pragma unroll
      for (int v = 0; v < left; ++v) to[v * P::groups * frame_stride()] = from_float<Output>(sum[v]);
    } else {
#pragma unroll
      for (int v = 0; v < left; ++v) {
        if (v * P::groups < stored) to[v * P::groups * frame_stride()] = from_float<Output>(sum[v]);
      }
    }
  }
  if constexpr (Config::extremes) {  // of each warp
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      top = larger(top, __shfl_xor_sync(0xffffffffu, top, offset));
      bottom = -larger(-bottom, -__shfl_xor_sync(0xffffffffu, bottom, offset));
    }
    if (thread % 32 == 0) params.summary[(long long)tile.index * (Config::threads / 32) + thread / 32] = make_float2(top, bottom);
  }
}
