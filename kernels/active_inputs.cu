// A vector of one token and the list, in order, of its values above a threshold. Method: active_inputs.py.
//
// Compile-time constants (-D). Problem: MAKES 0 nothing, x is the vector; 1 RMSNorm of x + residual; 2 SiLU of gate times
// up; RESIDUAL 0 1; TYPE 0 float32, 1 float16, 2 bfloat16; ALIGNED 0 1, whether all vectors begin at multiples of 16
// bytes and have multiples of 8 values. Launch: CLUSTER 1, or thread blocks that send each other their sums (compute
// capability 9.0 and later); WARPS of a block; VECTORS of eight neighbours that a thread has.

#include "ptx.cuh"

constexpr int NORM = 1, GATED = 2; // what is made
constexpr u32 THREADS = 32 * WARPS, OF_BLOCK = THREADS * 8 * VECTORS; // values of a block

// Eight values of a vector from the i-th on, as they lie in memory; zeros beyond the last.
struct alignas(16) Eight {
    u32 words[TYPE ? 4 : 8];
};
INLINE Eight load(const char *from, u32 i, u32 count) {
    Eight own = {};
    if (!ALIGNED) {
        UNROLL for (u32 j = 0; j < 8; j++) {
            if (i + j >= count) continue;
            if (TYPE) own.words[j / 2] |= __ldg((const u16 *)from + i + j) << 16 * (j % 2);
            else own.words[j] = __ldg((const u32 *)from + i + j);
        }
        return own;
    }
    if (i < count)
        UNROLL for (u32 j = 0; j < (TYPE ? 1 : 2); j++)
            ((uint4 *)own.words)[j] = __ldg((const uint4 *)(from + i * (TYPE ? 2 : 4)) + j);
    return own;
}
INLINE void read(float (&v)[8], const Eight &own) {
    UNROLL for (u32 j = 0; j < 8; j++)
        v[j] = TYPE ? to_float<TYPE == 2>(own.words[j / 2] >> 16 * (j % 2) & 0xFFFF) : __uint_as_float(own.words[j]);
}
INLINE void store(char *to, const float (&v)[8], u32 i, u32 count) {
    if (!ALIGNED) {
        for (u32 j = 0; j < 8 && i + j < count; j++) {
            if (TYPE) ((u16 *)to)[i + j] = to_half<TYPE == 2>(v[j]);
            else ((float *)to)[i + j] = v[j];
        }
        return;
    }
    if (i >= count) return;
    if (TYPE) {
        *(uint4 *)(to + i * 2) = {to_halves<TYPE == 2>(v[0], v[1]), to_halves<TYPE == 2>(v[2], v[3]),
                                  to_halves<TYPE == 2>(v[4], v[5]), to_halves<TYPE == 2>(v[6], v[7])};
    } else {
        *(float4 *)(to + i * 4) = {v[0], v[1], v[2], v[3]};
        *(float4 *)(to + i * 4 + 16) = {v[4], v[5], v[6], v[7]};
    }
}
// v / (1 + exp(-v)) as __fdiv_rn divides, without its branch for what is not normal: v below -87 counts as -87, whose
// result is -1e-36, and an infinite one as no number.
INLINE float silu(float v) {
    v = v < -87 ? -87 : v;
    const float d = 1 + __expf(-v), first = reciprocal(d);
    const float inverse = fmaf(first, fmaf(-d, first, 1), first), quotient = v * inverse;
    return fmaf(fmaf(-d, quotient, v), inverse, quotient);
}
// To the vectors' type and back, two at a time: single ones would take as long as the exponentials.
INLINE void round(float (&v)[8]) {
    if (TYPE)
        UNROLL for (int j = 0; j < 8; j += 2) {
            const u32 pair = to_halves<TYPE == 2>(v[j], v[j + 1]);
            v[j] = to_float<TYPE == 2>(pair & 0xFFFF), v[j + 1] = to_float<TYPE == 2>(pair >> 16);
        }
}

extern "C" __global__ void __launch_bounds__(THREADS)
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
active_inputs(const char *__restrict__ x, const char *__restrict__ residual, const char *__restrict__ weight,
              char *__restrict__ y, char *__restrict__ total, int *__restrict__ active, u32 K, u32 eps, u32 threshold) {
    __shared__ float squares[WARPS], all_squares[CLUSTER];
    __shared__ u32 counts[WARPS];
    __shared__ float all_counts[CLUSTER]; // the bits of integers
    extern __shared__ __align__(128) char shared[];
    auto staged = (u16 *)shared; // places within the block of what it lists
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, block = blockIdx.x;
    const u32 first = (block * THREADS + threadIdx.x) * 8 * VECTORS;
    const char *second = MAKES == GATED ? x + (u64)K * (TYPE ? 2 : 4) : residual;
    constexpr bool TWO = MAKES == GATED || MAKES == NORM && RESIDUAL;
    Eight own_x[VECTORS], other[VECTORS]; // on their way while the cluster gets ready
    UNROLL for (u32 n = 0; n < VECTORS; n++) {
        own_x[n] = load(x, first + 8 * n, K);
        if (TWO) other[n] = load(second, first + 8 * n, K);
    }
#if CLUSTER > 1
    __shared__ u64 arrived[2];
    if (threadIdx.x == 0) {
        expect_bytes(shared_address(arrived), CLUSTER * 4);
        if (MAKES == NORM) expect_bytes(shared_address(arrived + 1), CLUSTER * 4);
    }
    cluster_arrive();
    bool all_started = false;
    if (K == 0) return; // never: the compiler moves nothing over a branch, else all values came before the arrival
#endif
    // Gives the block's value to all blocks of the cluster, which wait for those of all and have them in their order.
    auto give = [&](float (&all)[CLUSTER], float own, u32 phase) {
#if CLUSTER > 1
        if (!all_started) cluster_wait();
        all_started = true;
        if (threadIdx.x < CLUSTER) send(shared_address(all + block), own, shared_address(arrived + phase), threadIdx.x);
#else
        if (threadIdx.x == 0) all[0] = own;
#endif
    };
    auto wait = [&](u32 phase) {
#if CLUSTER > 1
        wait_for_bytes(shared_address(arrived + phase));
#else
        __syncthreads();
#endif
    };

    float v[VECTORS][8], sum = 0;
    UNROLL for (u32 n = 0; n < VECTORS; n++) {
        float more[8];
        read(v[n], own_x[n]);
        if (TWO) read(more, other[n]);
        if (MAKES == GATED) {
            UNROLL for (int j = 0; j < 8; j++) v[n][j] = silu(v[n][j]);
            round(v[n]);
            UNROLL for (int j = 0; j < 8; j++) v[n][j] *= more[j];
            round(v[n]);
        }
        if (MAKES == NORM) {
            if (RESIDUAL) {
                UNROLL for (int j = 0; j < 8; j++) v[n][j] += more[j];
                round(v[n]);
            }
            store(total, v[n], first + 8 * n, K);
            UNROLL for (int j = 0; j < 8; j++) sum += v[n][j] * v[n][j];
        }
    }
    if (MAKES == NORM) {
        UNROLL for (int mask = 1; mask < 32; mask *= 2) sum += __shfl_xor_sync(~0u, sum, mask);
        if (lane == 0) squares[warp] = sum;
        float scale[VECTORS][8];
        UNROLL for (u32 n = 0; n < VECTORS; n++) read(scale[n], load(weight, first + 8 * n, K));
        __syncthreads();
        sum = 0;
        UNROLL for (int w = 0; w < WARPS; w++) sum += squares[w];
        give(all_squares, sum, 1);
        wait(1);
        sum = 0;
        UNROLL for (int b = 0; b < CLUSTER; b++) sum += all_squares[b];
        const float factor = rsqrtf(__fdiv_rn(sum, K) + __uint_as_float(eps));
        UNROLL for (u32 n = 0; n < VECTORS; n++) {
            UNROLL for (int j = 0; j < 8; j++) v[n][j] *= factor;
            round(v[n]);
            UNROLL for (int j = 0; j < 8; j++) v[n][j] *= scale[n][j];
            round(v[n]);
        }
    }

    u32 listed[VECTORS], own = 0; // bits of the values above the threshold, and how many
    UNROLL for (u32 n = 0; n < VECTORS; n++) {
        listed[n] = 0;
        UNROLL for (u32 j = 0; j < 8; j++)
            listed[n] |= u32(first + 8 * n + j < K && !(fabsf(v[n][j]) <= __uint_as_float(threshold))) << j;
        own += __popc(listed[n]);
    }
    own = __reduce_add_sync(~0u, own);
    if (lane == 0) counts[warp] = own;
    __syncthreads();
    const u32 of_warp = lane < WARPS ? counts[lane] : 0; // of the warp that is this lane's number
    const u32 of_block = __reduce_add_sync(~0u, of_warp);
    give(all_counts, __uint_as_float(of_block), 0);

    // While other blocks' counts are on their way: the vector, and what this block lists, one after the other in shared
    // memory, as neighbours of a thread are no neighbours of its warp.
    u32 before = __reduce_add_sync(~0u, lane < warp ? of_warp : 0); // listed by the block's threads before this one
    UNROLL for (u32 n = 0; n < VECTORS; n++)
        UNROLL for (u32 j = 0; j < 8; j++)
            before += __popc(__ballot_sync(~0u, listed[n] >> j & 1) & (1u << lane) - 1);
    UNROLL for (u32 n = 0; n < VECTORS; n++) {
        if (MAKES) store(y, v[n], first + 8 * n, K);
        UNROLL for (u32 j = 0; j < 8; j++)
            if (listed[n] >> j & 1) staged[before++] = threadIdx.x * 8 * VECTORS + 8 * n + j;
    }
    __syncthreads();
    const u32 begin = block * OF_BLOCK, of_values = min(K, begin + OF_BLOCK) - min(K, begin);
    u32 entries[8 * VECTORS]; // of the list, then zeros behind the list: as many as the block has values
    UNROLL for (u32 i = 0; i < 8 * VECTORS; i++) {
        const u32 at = threadIdx.x + i * THREADS;
        entries[i] = at < of_block ? begin + staged[at] : 0;
    }
    wait(0);
    const u32 of_one = lane < CLUSTER ? __float_as_uint(all_counts[lane]) : 0; // of the block that is this lane's number
    const u32 start = __reduce_add_sync(~0u, lane < block ? of_one : 0); // listed before the block
    UNROLL for (u32 i = 0; i < 8 * VECTORS; i++) {
        const u32 at = threadIdx.x + i * THREADS;
        if (at < of_values) active[start + (at < of_block ? 1 + at : K - begin + of_block - at)] = entries[i];
    }
    const u32 all = __reduce_add_sync(~0u, of_one);
    if (first == 0) active[0] = all;
}
