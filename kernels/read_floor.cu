// out[p] = exclusive or of the words of block p of x. See read_floor.py.
//
// Compile-time constants: BLOCK words of a program; WARPS of a program.

#include "ptx.cuh"

constexpr int THREADS = 32 * WARPS, LOADS = BLOCK / 4 / THREADS;  // of 16 bytes, of a thread
static_assert(LOADS * 4 * THREADS == BLOCK && LOADS > 0, "a block does not divide");

// `last`: words of the last block. x begins at a multiple of 16 bytes.
extern "C" __global__ void __launch_bounds__(THREADS) read_floor(const uint4* x, u32* out, u32 last) {
    const u32 thread = threadIdx.x, block = blockIdx.x;
    const uint4* from = x + (u64)block * (BLOCK / 4) + thread;
    const u64 policy = evict_first();
    uint4 v[LOADS] = {};
    u32 found = 0;
    if (block + 1 < gridDim.x || last == BLOCK) {
        UNROLL for (int i = 0; i < LOADS; i++) v[i] = load_past_l1(from + i * THREADS, policy);
    } else {
        UNROLL for (int i = 0; i < LOADS; i++)
            if (i * THREADS + thread < last / 4) v[i] = load_past_l1(from + i * THREADS, policy);
        if (thread < last % 4) found = ((const u32*)(from - thread))[last / 4 * 4 + thread];
    }
    UNROLL for (int i = 0; i < LOADS; i++) found ^= v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
    found = __reduce_xor_sync(~0u, found);
#if WARPS > 1
    __shared__ u32 parts[WARPS];
    if (thread % 32 == 0) parts[thread / 32] = found;
    __syncthreads();
    if (thread >= 32) return;
    found = __reduce_xor_sync(~0u, thread < WARPS ? parts[thread] : 0);
#endif
    if (thread == 0) out[block] = found;
}
