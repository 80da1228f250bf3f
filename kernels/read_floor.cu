// out[p] = xor of the 32-bit words of block p of x: a plain reader, one of those of read_floor.py.
//
// Compiled once per configuration; the launcher defines:
//   THREADS  threads of a block         LOADS  16-byte loads of a thread, all in flight before the first is used
#include "ptx.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) read_floor(const u32 *__restrict__ x, u32 *__restrict__ out,
                                                                 int words) {
    __shared__ u32 partial[THREADS / 32];
    const int thread = threadIdx.x;
    const u64 first = (u64)blockIdx.x * THREADS * LOADS * 4, policy = evict_first();
    uint4 values[LOADS];
    UNROLL for (int i = 0; i < LOADS; i++) {
        const u64 word = first + (u64)(i * THREADS + thread) * 4;
        values[i] = {0, 0, 0, 0};
        if (word + 4 <= (u64)words) {
            values[i] = load_past_l1(x + word, policy);
        } else { // the last words, if their number is no multiple of 4
            if (word < (u64)words) values[i].x = x[word];
            if (word + 1 < (u64)words) values[i].y = x[word + 1];
            if (word + 2 < (u64)words) values[i].z = x[word + 2];
        }
    }
    u32 sum = 0;
    UNROLL for (int i = 0; i < LOADS; i++) sum ^= values[i].x ^ values[i].y ^ values[i].z ^ values[i].w;
    UNROLL for (int mask = 16; mask; mask /= 2) sum ^= __shfl_xor_sync(0xFFFFFFFF, sum, mask);
    if (thread % 32 == 0) partial[thread / 32] = sum;
    __syncthreads();
    if (thread == 0) {
        UNROLL for (int i = 1; i < THREADS / 32; i++) sum ^= partial[i];
        out[blockIdx.x] = sum;
    }
}
