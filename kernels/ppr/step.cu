// One step of the power iteration, y = d T x + (1 - d) s, on blocks of B columns (row-major, N x B).
//
// A thread owns one column of a few consecutive rows. Threads of a warp lie along the columns, so each reads
// the same stored edge and neighbouring cells of x. There is no shared memory, no shuffle and no atomic: every
// sum runs in an order that depends on the graph alone, so a column's cells depend neither on the launch's
// shape nor on the columns beside it. Rows with many edges would keep one thread busy while the others wait; they are
// cut into segments whose sums are made first.
//
// x and y are float32, or float16 bits; sums are float32 and the reported changes float64 either way.
// No header is needed, so NVRTC alone compiles this file. Tests compile it for the host: they define the CUDA
// keywords, widen() and narrow() before they include it.

#ifdef __CUDACC__
__device__ inline float widen(unsigned short bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

__device__ inline unsigned short narrow(float value) {  // to the nearest float16, ties to even
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
#endif

struct Half {
  unsigned short bits;
};

__device__ inline float load(const float *cell) { return *cell; }
__device__ inline float load(const Half *cell) { return widen(cell->bits); }
__device__ inline void store(float *cell, float value) { *cell = value; }
__device__ inline void store(Half *cell, float value) { cell->bits = narrow(value); }

// Sum of transition * x over the stored edges begin .. end - 1, in one column.
template <typename Cell>
__device__ inline float gather(long long begin, long long end, const int *__restrict__ indices,
                               const float *__restrict__ transition, const Cell *__restrict__ x,
                               long long width, long long column) {
  float total = 0.0f;
#ifdef __CUDACC__
#pragma unroll 4
#endif
  for (long long edge = begin; edge < end; ++edge) {
    total = fmaf(transition[edge], load(x + indices[edge] * width + column), total);
  }
  return total;
}

// sums[segment, column] for the segments begins[segment] .. ends[segment] - 1 of long rows.
template <typename Cell>
__device__ inline void sum_segments(long long n_segments, long long width, const long long *begins,
                                    const long long *ends, const int *indices, const float *transition,
                                    const Cell *x, float *sums) {
  const long long segment = (long long)blockIdx.x * blockDim.y + threadIdx.y;
  const long long column = (long long)blockIdx.y * blockDim.x + threadIdx.x;
  if (segment >= n_segments || column >= width) return;
  sums[segment * width + column] =
      gather(begins[segment], ends[segment], indices, transition, x, width, column);
}

// y in active columns, a copy of x in the others, and changes[chunk, column] = sum |y - x| over a chunk's
// rows, with y as it was before it was stored. Row r has the segments first_segment[r] .. [r + 1] - 1, none
// if it is short. Restart rows are those of the nodes first_node .. first_node + n_restart - 1.
template <typename Cell>
__device__ inline void advance(long long n_nodes, long long width, long long chunk_rows,
                               const long long *indptr, const int *indices, const float *transition,
                               const int *first_segment, const float *sums, const float *restart,
                               long long first_node, long long n_restart, float damping,
                               const unsigned char *active, const Cell *x, Cell *y, double *changes) {
  const long long chunk = (long long)blockIdx.x * blockDim.y + threadIdx.y;
  const long long column = (long long)blockIdx.y * blockDim.x + threadIdx.x;
  const long long begin = chunk * chunk_rows;
  const long long end = begin + chunk_rows < n_nodes ? begin + chunk_rows : n_nodes;
  if (begin >= n_nodes || column >= width) return;
  double change = 0.0;
  for (long long row = begin; row < end; ++row) {
    const long long cell = row * width + column;
    if (!active[column]) {
      y[cell] = x[cell];
      continue;
    }
    float total = 0.0f;
    if (first_segment[row] == first_segment[row + 1]) {
      total = gather(indptr[row], indptr[row + 1], indices, transition, x, width, column);
    } else {
      for (long long segment = first_segment[row]; segment < first_segment[row + 1]; ++segment) {
        total += sums[segment * width + column];
      }
    }
    total *= damping;
    if (row >= first_node && row < first_node + n_restart) {
      total = fmaf(1.0f - damping, restart[(row - first_node) * width + column], total);
    }
    change += fabsf(total - load(x + cell));
    store(y + cell, total);
  }
  changes[chunk * width + column] = change;
}

#define KERNELS(NAME, CELL)                                                                                 \
  extern "C" __global__ void segments_##NAME(long long n_segments, long long width, const long long *begins, \
                                             const long long *ends, const int *indices,                     \
                                             const float *transition, const CELL *x, float *sums) {         \
    sum_segments(n_segments, width, begins, ends, indices, transition, x, sums);                            \
  }                                                                                                         \
  extern "C" __global__ void step_##NAME(                                                                   \
      long long n_nodes, long long width, long long chunk_rows, const long long *indptr,                    \
      const int *indices, const float *transition, const int *first_segment, const float *sums,             \
      const float *restart, long long first_node, long long n_restart, float damping,                       \
      const unsigned char *active, const CELL *x, CELL *y, double *changes) {                               \
    advance(n_nodes, width, chunk_rows, indptr, indices, transition, first_segment, sums, restart,          \
            first_node, n_restart, damping, active, x, y, changes);                                         \
  }

KERNELS(float32, float)
KERNELS(float16, Half)
