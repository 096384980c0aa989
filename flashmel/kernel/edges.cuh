// The adjoint of the padding. Positions of the padded signal near its ends have several others folded onto them: their sums go
// to params.edges, (rows, edge_length) in float32, and from there to the gradient: by the team that wrote them all, or where
// several did, by a small kernel of its own.
#pragma once

template <class Config>
struct Edges {
  static constexpr bool fold = (Config::margin > 0 || Config::right_margin > 0) && Config::pad_mode != PadMode::constant;
  static constexpr long long left_side = 2ll * Config::margin + 1, right_side = 2ll * Config::right_margin + 1;  // positions
  // Samples `low` ... n_samples - high are the ones that nothing is folded onto, and that were not cropped.
  static constexpr long long crop = Config::pad < 0 ? -(long long)Config::pad : 0;
  __device__ static constexpr long long reach(int margin) {
    return !fold ? crop : margin + 1 > Config::pad ? margin + 1 - (long long)Config::pad : 0;
  }
  static constexpr long long low = reach(Config::margin), high = reach(Config::right_margin);

  const Params& params;
  long long row, n_samples = row_samples<Config>(params, unsigned(row));

  __device__ long long length() const { return n_samples + 2ll * Config::pad; }  // of the signal after `pad`
  __device__ long long total() const { return length() + Config::margin + Config::right_margin; }
  // Place of position q of the padded signal in a row of params.edges, or -1.
  __device__ long long place(long long q) const {
    if (q < 0 || q >= total()) return -1;
    if (q < left_side) return q;
    const long long right = max(left_side, total() - right_side);
    return q >= right ? left_side + q - right : -1;
  }
  __device__ float at(long long j) const { return params.edges[row * params.edge_length + place(j + Config::margin)]; }
};

// The gradient `value` at position i + pad + margin of the padded signal.
template <class Config>
__device__ inline void store_edge(const Params& params, long long row, long long i, float value) {
  using Input = typename Config::Input;
  const Edges<Config> edges{params, row};
  if (i >= edges.low && i < edges.n_samples - edges.high) {
    static_cast<Input*>(params.gradient)[row * params.n_samples + i] = from_float<Input>(value);
  } else if constexpr (Edges<Config>::fold) {
    const long long place = edges.place(i + Config::pad + Config::margin);
    if (place >= 0) params.edges[row * params.edge_length + place] = value;
  }
}

// The sum of all positions that the padding took from the sample at place `place` of params.edges; 0 if there is no sample.
template <class Config>
__device__ inline float folded(const Params& params, long long row, long long place, long long& i) {
  const Edges<Config> edges{params, row};
  const long long length = edges.length(), left = Config::margin, right = Config::right_margin;
  const long long q = place < edges.left_side ? place : place - edges.left_side + max(edges.left_side, edges.total() - edges.right_side);
  const long long j = q - left;
  i = j - Config::pad;
  if (j < 0 || j >= length || i < 0 || i >= edges.n_samples) i = -1;
  if (i < 0) return 0.0f;
  float sum = edges.at(j);
  if constexpr (Config::pad_mode == PadMode::reflect) {
    if (j >= 1 && j <= left) sum += edges.at(-j);
    if (j <= length - 2 && j >= length - 1 - right) sum += edges.at(2 * (length - 1) - j);
  } else if constexpr (Config::pad_mode == PadMode::symmetric) {
    if (j < left) sum += edges.at(-1 - j);
    if (j >= length - right) sum += edges.at(2 * length - 1 - j);
  } else if constexpr (Config::pad_mode == PadMode::replicate) {
    for (long long n = 1; j == 0 && n <= left; ++n) sum += edges.at(-n);
    for (long long n = 0; j == length - 1 && n < right; ++n) sum += edges.at(length + n);
  } else {
    if (j >= length - left) sum += edges.at(j - length);
    if (j < right) sum += edges.at(j + length);
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

// The same for those ends that lie in the segment which the team has just finished; for reflection and symmetry alone, which mirror n
// steps before an end to n steps behind it, or n + 1.
template <class Config>
__device__ inline void fold_ends(const Params& params, const Tile& tile) {
  if constexpr (Edges<Config>::fold && (Config::pad_mode == PadMode::reflect || Config::pad_mode == PadMode::symmetric)) {
    using Input = typename Config::Input;
    constexpr int left = Config::margin, right = Config::right_margin, skipped = Config::pad_mode == PadMode::reflect ? 0 : 1;
    const int length = int(params.edge_length);
    const float* const edges = params.edges + tile.row(params) * params.edge_length;
    Input* const gradient = static_cast<Input*>(params.gradient) + tile.row(params) * params.n_samples;
    const bool first = tile.number(params) == 0, last = tile.number(params) + 1 == params.segments;
#pragma unroll 1
    for (int n = Place<Config>().thread; n <= (left > right ? left : right); n += Config::threads) {
      const long long i = n - (long long)Config::pad;  // so far into the waveform, from either end
      if (i < 0 || i >= params.n_samples) continue;
      // Sample n from an end takes in what lies `mirrored` positions outside of it.
      const int mirrored = n + skipped;
      if (first && n <= left) {
        const float folded = mirrored > 0 && mirrored <= left ? edges[left - mirrored] : 0.0f;
        gradient[i] = from_float<Input>(edges[left + n] + folded);
      }
      if (last && n <= right) {
        const float folded = mirrored > 0 && mirrored <= right ? edges[length - 1 - right + mirrored] : 0.0f;
        gradient[params.n_samples - 1 - i] = from_float<Input>(edges[length - 1 - right - n] + folded);
      }
    }
  }
}
