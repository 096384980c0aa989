// Stage 2: |X|^power of every frame of the tile, in shared memory, in place of the samples.
//
// A real frame of n_fft samples is one complex transform of m = n_fft / 2 points (even samples real, odd samples
// imaginary), m = r1 * r2 * r3 (r2 may be 1), each factor a whole transform in one thread's registers:
//   columns  r1-point transforms over samples c, c + m/r1, ...    twiddle W_m^(c k1)         to e[k1][c]
//   middle   r2-point transforms inside row k1                    twiddle W_(r2 r3)^(c2 k2)  in place, e[k1][k2 r3 + c2]
//   rows     r3-point transforms of rows r = k1 + r1 k2           Z[r + r1 r2 k3]
// The real spectrum needs Z[k] and Z[m - k] together, which lie in rows r and r1 r2 - r: one thread takes both, so the
// spectrum never leaves its registers. Lanes of a warp are frames first: tables are then read by broadcast.
// The factor 1/2 of the separation is in the window table.
#pragma once

template <int size>  // the same code for every architecture: compiler.py keeps only this one's records
using Transform = decltype(cufftdx::Size<size>() + cufftdx::Precision<float>() + cufftdx::Type<cufftdx::fft_type::c2c>() +
                           cufftdx::Direction<cufftdx::fft_direction::forward>() + cufftdx::Thread());
using Complex = cufftdx::complex<float>;

template <int size>
__device__ inline void transform(Complex* a) {
  if constexpr (size > 1) Transform<size>().execute(a);
}

template <class Config>
__device__ inline int thread_of_frame() {
  return threadIdx.x / Config::frames_per_block;
}

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

// Offset of sample pair (2n, 2n + 1), n = c + columns * j, from the start of its frame.
template <class Config>
__device__ inline int staged_pair(int c, int j) {
  constexpr int step = 2 * (Config::n_fft / 2 / Config::r1);
  if constexpr (Stage<Config>::pitch % step == 0) return 2 * c + Stage<Config>::place(step * j);  // no skew inside a step
  return Stage<Config>::place(2 * c + step * j);
}

// The columns of one thread, and their window values: asked for while the block waits for its samples.
template <class Config>
struct Columns {
  static constexpr int radix = Config::r1, count = Config::n_fft / 2 / radix;
  static constexpr int items = (count + Config::threads_per_frame - 1) / Config::threads_per_frame;
  float4 window[items][(radix + 1) / 2];

  __device__ explicit Columns(const float4* tables) {
#pragma unroll
    for (int item = 0; item < items; ++item) {
      const int c = thread_of_frame<Config>() + item * Config::threads_per_frame;
      if (c >= count) break;
#pragma unroll
      for (int j = 0; j < radix; j += 2) window[item][j / 2] = tables[Config::window_table + j / 2 * count + c];
    }
  }
};

template <class Config>
__device__ inline void columns(const Columns<Config>& mine, const float4* tables, unsigned char* shared, int frame, int thread) {
  constexpr int radix = Config::r1, count = Columns<Config>::count, items = Columns<Config>::items;
  const float* samples = reinterpret_cast<const float*>(shared) + frame * Config::sample_stride;
  Complex a[items][radix];
#pragma unroll
  for (int item = 0; item < items; ++item) {
    const int c = thread + item * Config::threads_per_frame;
    if (c >= count) break;
#pragma unroll
    for (int j = 0; j < radix; j += 2) {
#pragma unroll
      for (int h = 0; h < 2 && j + h < radix; ++h) {
        const float* pair = samples + staged_pair<Config>(c, j + h);
        float2 x;
        if constexpr (Config::sample_stride % 2 == 0 && Config::skew % 2 == 0) {
          x = *reinterpret_cast<const float2*>(pair);
        } else {
          x = make_float2(pair[0], pair[1]);
        }
        const float2 w = half_of(mine.window[item][j / 2], h);
        a[item][j + h].x = x.x * w.x;
        a[item][j + h].y = x.y * w.y;
      }
    }
  }
  __syncthreads();  // all samples are in registers: the exchange takes their place
  float2* e = reinterpret_cast<float2*>(shared) + frame * Config::frame_stride;
#pragma unroll
  for (int item = 0; item < items; ++item) {
    const int c = thread + item * Config::threads_per_frame;
    if (c >= count) break;
    transform<radix>(a[item]);
    twiddle_and_store<radix>(a[item], tables + Config::column_table + c, count, e + c, Config::row_stride);
  }
}

template <class Config>
__device__ inline void middle(const float4* tables, unsigned char* shared, int frame, int thread) {
  constexpr int radix = Config::r2, count = Config::n_fft / 2 / radix;
  float2* e = reinterpret_cast<float2*>(shared) + frame * Config::frame_stride;
#pragma unroll 1
  for (int item = thread; item < count; item += Config::threads_per_frame) {
    const int c = item % Config::r3;
    float2* at = e + item / Config::r3 * Config::row_stride + c;
    Complex a[radix];
#pragma unroll
    for (int j = 0; j < radix; ++j) {
      const float2 z = at[j * Config::r3];
      a[j].x = z.x;
      a[j].y = z.y;
    }
    transform<radix>(a);
    twiddle_and_store<radix>(a, tables + Config::middle_table + c, Config::r3, at, Config::r3);
  }
}

// Powers of bins k and m - k from z = Z[k], y = Z[m - k] and w = W_n_fft^k.
template <class Config>
__device__ inline void separate(float* power, int k, Complex z, Complex y, float2 w) {
  const float even_x = z.x + y.x, even_y = z.y - y.y;
  const float odd_x = z.y + y.y, odd_y = y.x - z.x;
  const float turned_x = odd_x * w.x - odd_y * w.y, turned_y = odd_x * w.y + odd_y * w.x;
  const float ax = even_x + turned_x, ay = even_y + turned_y, bx = even_x - turned_x, by = even_y - turned_y;
  power[k * Config::frames_per_block] = raise<Config>(ax * ax + ay * ay);
  power[(Config::n_fft / 2 - k) * Config::frames_per_block] = raise<Config>(bx * bx + by * by);
}

// Bins of rows u and rows - u; of rows 0 and rows / 2, each its own partner, where `self` is set (u = 0).
// Slot s of the separation table holds the factor of the s-th call of separate: tables.py builds it in this order.
template <class Config, bool self>
__device__ inline void separate_rows(float* power, const Complex* a, const Complex* b, const float4* table, int u) {
  constexpr int m = Config::n_fft / 2, radix = Config::r3, rows = m / radix, pairs = (rows + 1) / 2;
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
  if constexpr (self) {  // the zero bins behind the last
#pragma unroll
    for (int bin = m + 1; bin < m + 2 * Config::bin_slices; ++bin) power[bin * Config::frames_per_block] = 0.0f;
  }
  if constexpr (self && m % 2 == 0) {  // bin m / 2 is its own partner
    const Complex z = radix % 2 == 0 ? a[radix / 2] : b[radix / 2];
    power[m / 2 * Config::frames_per_block] = raise<Config>(4.0f * (z.x * z.x + z.y * z.y));
  }
}

template <class Config>
__device__ inline void rows(const float4* tables, unsigned char* shared, int frame, int thread) {
  constexpr int radix = Config::r3, rows = Config::n_fft / 2 / radix, pairs = (rows + 1) / 2;
  constexpr int items = (pairs + Config::threads_per_frame - 1) / Config::threads_per_frame;
  const float2* e = reinterpret_cast<const float2*>(shared) + frame * Config::frame_stride;
  Complex a[items][2][radix];
#pragma unroll
  for (int item = 0; item < items; ++item) {
    const int u = thread + item * Config::threads_per_frame;
    if (u >= pairs) break;
#pragma unroll
    for (int side = 0; side < 2; ++side) {
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
  __syncthreads();  // all rows are in registers: the powers take their place
  float* power = reinterpret_cast<float*>(shared) + Projection<Config>::place(frame);
#pragma unroll
  for (int item = 0; item < items; ++item) {
    const int u = thread + item * Config::threads_per_frame;
    if (u >= pairs) break;
    transform<radix>(a[item][0]);
    transform<radix>(a[item][1]);
    const float4* table = tables + Config::separation_table + u;
    if (u == 0) {
      separate_rows<Config, true>(power, a[item][0], a[item][1], table, u);
    } else {
      separate_rows<Config, false>(power, a[item][0], a[item][1], table, u);
    }
  }
}

template <class Config>
__device__ inline void fft(const Columns<Config>& mine, const float4* tables, unsigned char* shared) {
  const int frame = threadIdx.x % Config::frames_per_block, thread = thread_of_frame<Config>();
  columns<Config>(mine, tables, shared, frame, thread);
  __syncthreads();
  if constexpr (Config::r2 > 1) {
    middle<Config>(tables, shared, frame, thread);
    __syncthreads();
  }
  rows<Config>(tables, shared, frame, thread);
}
