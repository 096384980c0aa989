// Stage 2: |X|^power of every frame of the tile, in shared memory.
//
// Even n_fft: the real spectrum needs Z[k] and Z[m - k] together, which lie in rows r and r1 r2 - r: one thread takes both,
// so the spectrum never leaves its registers; the factor 1/2 of this separation is in the window table. Odd n_fft: the
// spectrum is Z, and half of the rows hold all of it.
#pragma once

// The thread's item-th of `count` columns or row pairs of its frame. Threads left over repeat the last one, without storing
// it: a branch around loads and transform would cost registers.
template <class Config, int count>
struct Share {
  static constexpr int items = (count + Config::threads_per_frame - 1) / Config::threads_per_frame;
  int index;
  bool stored = true;

  __device__ Share(int of_frame, int item) : index(of_frame + item * Config::threads_per_frame) {
    if constexpr (count % Config::threads_per_frame != 0) {
      stored = index < count;
      index = min(index, count - 1);
    }
  }
};

template <class Config, class LoadInner, class LoadEdge>
__device__ inline void columns(const typename Config::Input* samples, float2* spectra, const float4* factors, const Frame& frame,
                               LoadInner load_inner, LoadEdge load_edge) {
  constexpr int radix = Config::r1, count = Config::points / radix;
  using Column = Share<Config, count>;
  Complex a[Column::items][radix];
  {
    const Place<Config> place;
    samples += place.frame * Config::sample_stride;
#pragma unroll
    for (int item = 0; item < Column::items; ++item) {
      load_column<Config>(a[item], samples, factors, Column(place.of_frame, item).index, frame);
    }
  }
  team_barrier<Config>();  // all samples are in registers
  load_inner();
  const Place<Config> place;
  float2* e = spectra + place.frame * Config::frame_stride;
#pragma unroll
  for (int item = 0; item < Column::items; ++item) {
    const Column column(place.of_frame, item);
    const int c = column.index;
    dft<radix>(a[item]);
    if (column.stored) {
      twiddle_and_store<radix>(a[item], factors + opaque(Config::column_table + c), count, e + c, Config::row_stride);
    }
  }
  load_edge();  // not before: it would lack the registers that a[] takes
}

template <class Config>
__device__ inline float raise(float squared) {
  if constexpr (Config::epsilon > 0.0f) squared = Config::epsilon_is_added ? squared + Config::epsilon : at_least(squared, Config::epsilon);
  if constexpr (Config::power == 2.0f) return squared;
  if constexpr (Config::power == 1.0f) return sqrtf(squared);
  return powf(squared, 0.5f * Config::power);
}

// Powers of bins k and m - k from z = Z[k], y = Z[m - k] and w = W_n_fft^k.
template <class Config>
__device__ inline void separate(float* power, int k, Complex z, Complex y, float2 w) {
  const float even_x = z.x + y.x, even_y = z.y - y.y;
  const float odd_x = z.y + y.y, odd_y = y.x - z.x;
  const float ax = even_x + odd_x * w.x - odd_y * w.y, ay = even_y + odd_x * w.y + odd_y * w.x;  // E + w O
  const float bx = fmaf(2.0f, even_x, -ax), by = fmaf(2.0f, even_y, -ay);                                  // E - w O
  power[k * Config::frames_per_tile] = raise<Config>(ax * ax + ay * ay);
  power[(Config::n_fft / 2 - k) * Config::frames_per_tile] = raise<Config>(bx * bx + by * by);
}

// Bins of rows u and rows - u; of rows 0 and rows / 2, each its own partner, where `self` is set (u = 0).
// Slot s of the separation table holds the factor of the s-th call of separate: tables.py builds it in this order.
template <class Config, bool self>
__device__ inline void separate_rows(float* power, const Complex* a, const Complex* b, const float4* table, int u) {
  constexpr int m = Config::points, radix = Config::r3, rows = m / radix, pairs = (rows + 1) / 2;
  constexpr int from_row_0 = (radix + 1) / 2;
#pragma unroll
  for (int slot = 0; slot < radix; ++slot) {
    const float2 w = half_of(table[slot / 2 * pairs], slot % 2);
    if constexpr (!self) {
      separate<Config>(power, u + rows * slot, a[slot], b[radix - 1 - slot], w);
    } else if (slot < from_row_0) {
      separate<Config>(power, rows * slot, a[slot], a[(radix - slot) % radix], w);
    } else if constexpr (rows % 2 == 0) {
      const int q = slot - from_row_0;
      separate<Config>(power, rows / 2 + rows * q, b[q], b[radix - 1 - q], w);
    }
  }
  if constexpr (self && m % 2 == 0) {  // bin m / 2 is its own partner
    const Complex z = radix % 2 == 0 ? a[radix / 2] : b[radix / 2];
    power[m / 2 * Config::frames_per_tile] = raise<Config>(4.0f * (z.x * z.x + z.y * z.y));
  }
}

template <class Config>
__device__ inline void rows(float2* spectra, const float4* factors) {
  constexpr int radix = Config::r3, rows = Config::points / radix, pairs = (rows + 1) / 2;
  constexpr bool paired = Config::paired;
  constexpr int sides = paired && rows > 1 ? 2 : 1;
  using Pair = Share<Config, pairs>;
  Complex a[Pair::items][sides][radix];
  {
    const Place<Config> place;
    const float2* e = spectra + place.frame * Config::frame_stride;
#pragma unroll
    for (int item = 0; item < Pair::items; ++item) {
      const int u = Pair(place.of_frame, item).index;
#pragma unroll
      for (int side = 0; side < sides; ++side) {
        const int r = side == 0 ? u : u == 0 ? rows / 2 : rows - u;
        load_row<Config>(a[item][side], e, r);
      }
    }
  }
  team_barrier<Config>();  // all rows are in registers: the powers take their place
  const Place<Config> place;
  float* power = reinterpret_cast<float*>(spectra) + Projection<Config>::place(place.frame);
#pragma unroll
  for (int item = 0; item < Pair::items; ++item) {
    const Pair pair(place.of_frame, item);
    const int u = pair.index;
#pragma unroll
    for (int side = 0; side < sides; ++side) dft<radix>(a[item][side]);
    if (!pair.stored) continue;
    if constexpr (!paired) {  // rows - r holds the conjugates of r
#pragma unroll
      for (int j = 0; j < radix; ++j) {
        const int k = u + rows * j;
        const Complex z = a[item][0][j];
        power[min(k, Config::n_fft - k) * Config::frames_per_tile] = raise<Config>(z.x * z.x + z.y * z.y);
      }
    } else {
      const float4* table = factors + opaque(Config::separation_table + u);
      if (u == 0) {
        separate_rows<Config, true>(power, a[item][0], a[item][sides - 1], table, u);
      } else {
        separate_rows<Config, false>(power, a[item][0], a[item][sides - 1], table, u);
      }
    }
  }
  if (place.of_frame == 0) {  // the zero bins behind the last
#pragma unroll
    for (int bin = Config::n_fft / 2 + 1; bin < Config::n_fft / 2 + 1 + 2 * Config::bin_slices; ++bin) {
      power[bin * Config::frames_per_tile] = 0.0f;
    }
  }
}

// From the samples of a tile to its powers, both where Params of forward.cu says. Calls load_inner()
// and load_edge() once the samples may be overwritten.
template <class Config, class LoadInner, class LoadEdge>
__device__ inline void fft(const typename Config::Input* samples, float2* spectra, const float4* factors, const Frame& frame,
                           LoadInner load_inner, LoadEdge load_edge) {
  columns<Config>(samples, spectra, factors, frame, load_inner, load_edge);
  team_barrier<Config>();
  if constexpr (Config::r2 > 1) {
    middle<Config>(spectra, factors);
    team_barrier<Config>();
  }
  rows<Config>(spectra, factors);
}
