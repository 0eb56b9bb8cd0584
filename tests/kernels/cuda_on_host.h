// Enough of CUDA to compile kernels/ppr/step.cu for the host and run its grids as loops, for tests.
// Threads run one after the other, so it shows what a kernel computes, not how fast, and it would not show
// races; it runs grids forwards or backwards, and a result must not depend on that.
#include <cmath>
#include <cstring>
#include <utility>

#define __global__
#define __device__ static
#define __restrict__ __restrict

struct Index {
  unsigned x, y;
};
static thread_local Index blockIdx, blockDim, threadIdx;

static inline float widen(unsigned short bits) {
  _Float16 value;
  std::memcpy(&value, &bits, sizeof bits);
  return value;
}

static inline unsigned short narrow(float value) {
  const _Float16 nearest = static_cast<_Float16>(value);
  unsigned short bits;
  std::memcpy(&bits, &nearest, sizeof bits);
  return bits;
}

template <auto Kernel>
struct Launch;

// shape: grid x, grid y, block x, block y, and whether to run backwards.
template <typename... Arguments, void (*Kernel)(Arguments...)>
struct Launch<Kernel> {
  static void run(const unsigned *shape, Arguments... arguments) {
    const unsigned long long threads = 1ull * shape[0] * shape[1] * shape[2] * shape[3];
    blockDim = {shape[2], shape[3]};
    for (unsigned long long i = 0; i < threads; ++i) {
      unsigned long long rest = shape[4] ? threads - 1 - i : i;
      threadIdx.x = rest % shape[2], rest /= shape[2];
      threadIdx.y = rest % shape[3], rest /= shape[3];
      blockIdx.x = rest % shape[0], rest /= shape[0];
      blockIdx.y = rest;
      Kernel(arguments...);
    }
  }
};
