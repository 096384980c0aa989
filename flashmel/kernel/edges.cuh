// The adjoint of the padding. Positions of the padded signal near its ends have several others folded onto them: their sums go
// to params.edges, (rows, edge_length) in float32, and from there to the gradient: by the team that wrote them all, or where
// several did, by a small kernel of its own.
#pragma once

template <class Config>
struct Edges {
  static constexpr bool fold = Config::margin > 0 && Config::pad_mode != PadMode::constant;
  static constexpr long long side = 2ll * Config::margin + 1;  // positions at each end
  // Samples `low` ... n_samples - low are the ones that nothing is folded onto, and that were not cropped.
  static constexpr long long crop = Config::pad < 0 ? -(long long)Config::pad : 0;
  static constexpr long long reach = Config::margin + 1 - (long long)Config::pad;
  static constexpr long long low = fold ? (reach > 0 ? reach : 0) : crop;

  const Params& params;

  __device__ long long length() const { return params.n_samples + 2ll * Config::pad; }  // of the signal after `pad`
  __device__ long long total() const { return length() + 2ll * Config::margin; }
  // Place of position q of the padded signal in a row of params.edges, or -1.
  __device__ long long place(long long q) const {
    if (q < 0 || q >= total()) return -1;
    if (q < side) return q;
    const long long right = max(side, total() - side);
    return q >= right ? side + q - right : -1;
  }
  __device__ float at(long long row, long long j) const {
    return params.edges[row * params.edge_length + place(j + Config::margin)];
  }
};

// The gradient `value` at position i + pad + margin of the padded signal.
template <class Config>
__device__ inline void store_edge(const Params& params, long long row, long long i, float value) {
  using Input = typename Config::Input;
  const Edges<Config> edges{params};
  if (i >= edges.low && i < params.n_samples - edges.low) {
    static_cast<Input*>(params.gradient)[row * params.n_samples + i] = from_float<Input>(value);
  } else if constexpr (Edges<Config>::fold) {
    const long long place = edges.place(i + Config::pad + Config::margin);
    if (place >= 0) params.edges[row * params.edge_length + place] = value;
  }
}

// The sum of all positions that the padding took from the sample at place `place` of params.edges; 0 if there is no sample.
template <class Config>
__device__ inline float folded(const Params& params, long long row, long long place, long long& i) {
  const Edges<Config> edges{params};
  const long long length = edges.length(), margin = Config::margin;
  const long long q = place < edges.side ? place : place - edges.side + max(edges.side, edges.total() - edges.side);
  const long long j = q - margin;
  i = j - Config::pad;
  if (j < 0 || j >= length || i < 0 || i >= params.n_samples) i = -1;
  if (i < 0) return 0.0f;
  float sum = edges.at(row, j);
  if constexpr (Config::pad_mode == PadMode::reflect) {
    if (j >= 1 && j <= margin) sum += edges.at(row, -j);
    if (j <= length - 2 && j >= length - 1 - margin) sum += edges.at(row, 2 * (length - 1) - j);
  } else if constexpr (Config::pad_mode == PadMode::replicate) {
    for (long long n = 1; j == 0 && n <= margin; ++n) sum += edges.at(row, -n);
    for (long long n = 0; j == length - 1 && n < margin; ++n) sum += edges.at(row, length + n);
  } else {
    if (j >= length - margin) sum += edges.at(row, j - length);
    if (j < margin) sum += edges.at(row, j + length);
  }
  return sum;
}

// Both ends of a row: to the gradient.
template <class Config>
__device__ inline void fold_row(const Params& params, long long row) {
  using Input = typename Config::Input;
  Input* const gradient = static_cast<Input*>(params.gradient) + row * params.n_samples;
  const int step = gridDim.x * blockDim.x;
#pragma unroll 1
  for (int place = blockIdx.x * blockDim.x + threadIdx.x; place < params.edge_length; place += step) {
    long long i;
    const float sum = folded<Config>(params, row, place, i);
    if (i >= 0) gradient[i] = from_float<Input>(sum);
  }
}

// The same for those ends that lie in the segment which the team has just finished; for reflection alone, which mirrors n steps
// before an end to n steps behind it.
template <class Config>
__device__ inline void fold_ends(const Params& params, const Tile& tile) {
  if constexpr (Edges<Config>::fold && Config::pad_mode == PadMode::reflect) {
    using Input = typename Config::Input;
    const int length = int(params.edge_length);
    const float* const edges = params.edges + tile.row(params) * params.edge_length;
    Input* const gradient = static_cast<Input*>(params.gradient) + tile.row(params) * params.n_samples;
    const bool first = tile.number(params) == 0, last = tile.number(params) + 1 == params.segments;
#pragma unroll 1
    for (int n = Place<Config>().thread; n <= Config::margin; n += Config::threads) {
      const long long i = n - (long long)Config::pad;  // so far into the waveform, from either end
      if (i < 0 || i >= params.n_samples) continue;
      const int inside = Config::margin + n, outside = Config::margin - n;
      if (first) gradient[i] = from_float<Input>(edges[inside] + (n > 0 ? edges[outside] : 0.0f));
      if (last) {
        const float mirrored = n > 0 ? edges[length - 1 - outside] : 0.0f;
        gradient[params.n_samples - 1 - i] = from_float<Input>(edges[length - 1 - inside] + mirrored);
      }
    }
  }
}
