// Stage 2: |X|^power of every frame of the tile, in shared memory.
//
// A frame of n_fft samples, if that is even, is one complex transform of m = n_fft / 2 points (even samples real, odd
// samples imaginary); else one of m = n_fft points whose imaginary parts are 0. m = r1 * r2 * r3 (any of them may be 1),
// each factor a whole transform in one thread's registers:
//   columns  r1-point transforms over points c, c + m/r1, ...     twiddle W_m^(c k1)         to e[k1][c]
//   middle   r2-point transforms inside row k1                    twiddle W_(r2 r3)^(c2 k2)  in place, e[k1][k2 r3 + c2]
//   rows     r3-point transforms of rows r = k1 + r1 k2           Z[r + r1 r2 k3]
// Even n_fft: the real spectrum needs Z[k] and Z[m - k] together, which lie in rows r and r1 r2 - r: one thread takes both,
// so the spectrum never leaves its registers; the factor 1/2 of this separation is in the window table. Odd n_fft: the
// spectrum is Z, and half of the rows hold all of it. Lanes of a warp are frames first: tables are then read by broadcast.
#pragma once

// One of the pair of complex numbers that a table entry holds.
__device__ inline float2 half_of(float4 entry, int which) {
  return which == 0 ? make_float2(entry.x, entry.y) : make_float2(entry.z, entry.w);
}

// Multiply a[1 .. size) by the table's factors and store all of a at stride `stride`.
template <int size>
__device__ inline void twiddle_and_store(const Complex* a, const float4* table, int table_stride, float2* e, int stride) {
#pragma unroll
  for (int k = 0; k < size; k += 2) {
    const float4 entry = table[k / 2 * table_stride];
#pragma unroll
    for (int h = 0; h < 2 && k + h < size; ++h) {
      const Complex z = a[k + h];
      const float2 w = half_of(entry, h);
      e[(k + h) * stride] = k + h == 0 ? make_float2(z.x, z.y) : make_float2(z.x * w.x - z.y * w.y, z.x * w.y + z.y * w.x);
    }
  }
}

template <class Config>
__device__ inline float raise(float squared) {
  if constexpr (Config::power == 2.0f) return squared;
  if constexpr (Config::power == 1.0f) return sqrtf(squared);
  return powf(squared, 0.5f * Config::power);
}

// Where in its frame sample p lies, in shared memory; p = c + step * j, c below step.
template <class Config, int step>
__device__ inline int staged(int c, int j) {
  if constexpr (Stage<Config>::pitch % step == 0) return c + Stage<Config>::place(step * j);  // no skew inside a step
  return Stage<Config>::place(c + step * j);
}

// Point c + count * j of the frame's transform: a pair of samples, or one sample and 0.
template <class Config>
__device__ inline float2 point(const typename Config::Input* samples, int c, int j) {
  using Input = typename Config::Input;
  constexpr int count = Config::points / Config::r1;
  if constexpr (!Config::paired) {
    return make_float2(to_float(samples[staged<Config, count>(c, j)]), 0.0f);
  } else {
    const Input* const at = samples + staged<Config, 2 * count>(2 * c, j);
    if constexpr (Config::sample_stride % 2 == 0 && Config::skew % 2 == 0) {
      struct alignas(2 * sizeof(Input)) Pair {
        Input x, y;
      };
      const Pair pair = *reinterpret_cast<const Pair*>(at);
      return make_float2(to_float(pair.x), to_float(pair.y));
    } else {
      return make_float2(to_float(at[0]), to_float(at[1]));
    }
  }
}

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
__device__ inline void columns(const typename Config::Input* samples, float2* spectra, const float4* factors, LoadInner load_inner,
                               LoadEdge load_edge) {
  constexpr int radix = Config::r1, count = Config::points / radix;
  using Column = Share<Config, count>;
  Complex a[Column::items][radix];
  {
    const Place<Config> place;
    samples += place.frame * Config::sample_stride;
#pragma unroll
    for (int item = 0; item < Column::items; ++item) {
      const int c = Column(place.of_frame, item).index;
      const float4* const window = factors + opaque(Config::window_table + c);
#pragma unroll
      for (int j = 0; j < radix; j += 2) {
        const float4 entry = window[j / 2 * count];
#pragma unroll
        for (int h = 0; h < 2 && j + h < radix; ++h) {
          const float2 x = point<Config>(samples, c, j + h), w = half_of(entry, h);
          a[item][j + h].x = x.x * w.x;
          a[item][j + h].y = x.y * w.y;
          settle(a[item][j + h].x);
          settle(a[item][j + h].y);
        }
      }
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
__device__ inline void middle(float2* spectra, const float4* factors) {
  constexpr int radix = Config::r2, count = Config::points / radix;
  const Place<Config> place;
  float2* e = spectra + place.frame * Config::frame_stride;
#pragma unroll 1
  for (int item = place.of_frame; item < count; item += Config::threads_per_frame) {
    const int c = item % Config::r3;
    float2* at = e + item / Config::r3 * Config::row_stride + c;
    Complex a[radix];
#pragma unroll
    for (int j = 0; j < radix; ++j) {
      const float2 z = at[j * Config::r3];
      a[j].x = z.x;
      a[j].y = z.y;
    }
    dft<radix>(a);
    twiddle_and_store<radix>(a, factors + opaque(Config::middle_table + c), Config::r3, at, Config::r3);
  }
}

// Powers of bins k and m - k from z = Z[k], y = Z[m - k] and w = W_n_fft^k.
template <class Config>
__device__ inline void separate(float* power, int k, Complex z, Complex y, float2 w) {
  const float even_x = z.x + y.x, even_y = z.y - y.y;
  const float odd_x = z.y + y.y, odd_y = y.x - z.x;
  const float ax = even_x + odd_x * w.x - odd_y * w.y, ay = even_y + odd_x * w.y + odd_y * w.x;  // E + w O
  const float bx = 2.0f * even_x - ax, by = 2.0f * even_y - ay;                                  // E - w O
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
        const float2* row = e + r % Config::r1 * Config::row_stride + r / Config::r1 * radix;
#pragma unroll
        for (int j = 0; j < radix; ++j) {
          const float2 z = row[j];
          a[item][side][j].x = z.x;
          a[item][side][j].y = z.y;
        }
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

// From the samples of a tile to its powers, both where Params of kernel.cu says. Calls load_inner()
// and load_edge() once the samples may be overwritten.
template <class Config, class LoadInner, class LoadEdge>
__device__ inline void fft(const typename Config::Input* samples, float2* spectra, const float4* factors, LoadInner load_inner,
                           LoadEdge load_edge) {
  columns<Config>(samples, spectra, factors, load_inner, load_edge);
  team_barrier<Config>();
  if constexpr (Config::r2 > 1) {
    middle<Config>(spectra, factors);
    team_barrier<Config>();
  }
  rows<Config>(spectra, factors);
}
