// s_B (gamma(z) z), which a compensator's B is multiplied with: gamma(z) = 1 + tanh(W2 relu(W1 z + b1) + b2), or 1 where
// the hidden layer has no width.
#ifndef GATE_CUH
#define GATE_CUH

#include "ptx.cuh"

// Computes `to`, which may be z itself, by all threads of a block. In shared memory: the gate as halves, W1 [width, rank],
// W2 [rank, width], b1, b2, and z and the hidden layer. `up_scale` is s_B.
template <u32 rank, u32 width, u32 threads>
INLINE void scale_and_gate(const char *gate, const float *up_scale, const float *z, float *hidden, float *to, u32 thread) {
    if constexpr (width == 0) {
        if (thread < rank) to[thread] = __ldg(up_scale + thread) * z[thread];
    } else {
        const u32 W1 = shared_address(gate), W2 = W1 + width * rank * 2;
        const auto bias = (const u16 *)gate + 2 * width * rank;
        for (u32 j = thread; j < width; j += threads) {
            float sum = half_to_float(bias[j]);
            UNROLL for (u32 k = 0; k < rank; k += 8) {
                const uint4 eight = load16(W1 + (j * rank + k) * 2);
                UNROLL for (int i = 0; i < 8; i++) sum += half_to_float((&eight.x)[i / 2] >> 16 * (i % 2)) * z[k + i];
            }
            hidden[j] = max(sum, 0.f);
        }
        __syncthreads();
        for (u32 i = thread / 8; i < rank; i += threads / 8) { // eight lanes for each value
            float sum = 0;
            UNROLL for (u32 k = thread % 8 * 2; k < width; k += 16) {
                const u32 two = load_word(W2 + (i * width + k) * 2);
                sum += half_to_float(two) * hidden[k] + half_to_float(two >> 16) * hidden[k + 1];
            }
            UNROLL for (int mask = 4; mask > 0; mask /= 2) sum += __shfl_xor_sync(~0u, sum, mask);
            if (thread % 8 == 0) to[i] = __ldg(up_scale + i) * (1 + tanhf(sum + half_to_float(bias[width + i]))) * z[i];
        }
    }
}

#endif
