// Which cells of a tile of products may be pairs of the join?
//
// A thread walks ROWS rows of one column and notes its hits as bits. Threads of a warp lie along the columns,
// so their reads are coalesced, and a product is read once. Room in the output is reserved for all hits of a
// thread with one atomic addition, so even a tile of nothing but hits takes one addition for ROWS cells.
//
// The order in which threads reserve room differs from run to run: the caller sorts. Cells that find no room
// are not written but counted: if `count` ends above `capacity`, the caller asks again for fewer rows.
//
// No header is needed, so NVRTC alone compiles this file. Tests compile it for the host: they define the CUDA
// keywords and atomicAdd() before they include it.

#define ROWS 32

// products: float32, n_rows x n_columns. Row r is node rows[r], column c is node first_column + c.
// A product counts if it reaches row_low[r] or column_low[c]: what either end needs to keep the pair, less the
// rounding. asks[c]: node of column c is also a row of some tile; such a pair is taken where the row's node is
// the lower one. cells: r * n_columns + c.
extern "C" __global__ void nominate(long long n_rows, long long n_columns, const float *__restrict__ products,
                                    const long long *__restrict__ rows, long long first_column,
                                    const unsigned char *__restrict__ asks,
                                    const float *__restrict__ row_low, const float *__restrict__ column_low,
                                    long long capacity, unsigned long long *count, unsigned int *cells) {
  const long long column = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  const long long begin = ((long long)blockIdx.y * blockDim.y + threadIdx.y) * ROWS;
  if (column >= n_columns || begin >= n_rows) return;
  const int height = n_rows - begin < ROWS ? (int)(n_rows - begin) : ROWS;
  const long long node = first_column + column;
  const bool asking = asks[column] != 0;
  const float low = column_low[column];
  unsigned int hits = 0;
  unsigned long long n_hits = 0;
  for (int r = 0; r < height; ++r) {
    const long long other = rows[begin + r];
    const float least = fminf(row_low[begin + r], low);
    const bool taken = asking ? other < node : other != node;
    if (taken && products[(begin + r) * n_columns + column] >= least) {
      hits |= 1u << r;
      ++n_hits;
    }
  }
  if (n_hits == 0) return;
  long long place = (long long)atomicAdd(count, n_hits);
  for (int r = 0; r < height; ++r) {
    if (!(hits >> r & 1u)) continue;
    if (place < capacity) cells[place] = (unsigned int)((begin + r) * n_columns + column);
    ++place;
  }
}
