// y[m, n] = s_x[m] * s_w[n] * sum_k x_q[m, k] w_q[n, k], x quantized to int8 in the same launch. See w8a8_gemv.py.
//
// Compiled once per configuration; the launcher defines:
//   BF16     1 for bf16 activations, 0 for fp16        TOKENS   1..8, rows of x
//   WARPS    warps of a program, which split K         TILES    8-row tiles that a program works on at once
//   DEPTH    even: 16-byte loads in flight per tile    RESIDENT programs that share a multiprocessor
//   VECTORS  8-column pieces of a token per thread     ALIGNED  1 when every row begins at a multiple of 16 bytes
//   CLUSTER  1, 2, 4 or 8 programs that share the work of quantizing: each takes its tokens and hands the codes to all
//            (more than 1 needs compute capability 9.0)
//
// Weights are the right operand of mma.m16n8k32 (8 output channels), tokens the left one (8 of its 16 rows are used). A
// lane owns 16 consecutive bytes of one weight row: two steps of the mma, if the 16 columns are dealt out in the same
// order on both sides. So neither weights nor activations need any rearrangement.

#include "ptx.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int ROWS = 8 * TILES;
constexpr int ROUND = 64 * DEPTH * WARPS;  // columns
INLINE constexpr int offset(int d) { return d / 2 * 128 * WARPS + d % 2 * 64; }

// Sixteen weights; read once, so they are the first to leave L1 and L2.
INLINE uint4 load_weights(const signed char* w, int count, u64 policy) {
    uint4 v = {0, 0, 0, 0};
#if ALIGNED
    if (count > 0) v = load_line(w, policy);
#else
    signed char* bytes = reinterpret_cast<signed char*>(&v);
    for (int i = 0; i < 16; ++i) bytes[i] = i < count ? w[i] : 0;
#endif
    return v;
}

// Eight activations, zero beyond the token's end.
INLINE uint4 load_activations(const u16* x, int count) {
    uint4 v = {0, 0, 0, 0};
#if ALIGNED
    if (count > 0) v = load_early(x);  // ahead of the weights
#else
    u16* halves = reinterpret_cast<u16*>(&v);
    for (int i = 0; i < 8; ++i) halves[i] = i < count ? x[i] : 0;
#endif
    return v;
}

// Two activations to two codes in bytes 0 and 1. Adding 1.5 * 2^23 rounds half to even and leaves the code in the low
// byte.
INLINE u32 quantize(u32 pair, float inverse) {
    u32 low = __float_as_uint(__fmaf_rn(to_float<BF16>(pair & 0xFFFF), inverse, 12582912.0f));
    u32 high = __float_as_uint(__fmaf_rn(to_float<BF16>(pair >> 16), inverse, 12582912.0f));
    return __byte_perm(low, high, 0x0040);
}

// Bytes between two tokens in shared memory: 64 past a multiple of 128, so that 16-byte reads of two tokens never meet
// in a bank.
INLINE int token_stride(int K) { return (K + 127) / 128 * 128 + 64; }

// Hands 8 bytes to every program of the cluster, at the same place in its shared memory. `arrived` counts bytes there.
INLINE void hand_out(void* to, uint2 v, u64* arrived) {
#if CLUSTER > 1
UNROLL for (int rank = 0; rank < CLUSTER; ++rank) send(shared_address(to), v, shared_address(arrived), rank);
#else
    *reinterpret_cast<uint2*>(to) = v;
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
w8a8_gemv(const u16* __restrict__ x, const signed char* __restrict__ w, const float* __restrict__ s_w,
          u16* __restrict__ y, int N, int K) {
    extern __shared__ __align__(128) char shared[];
    char* const codes = shared;                             // [TOKENS][token_stride(K)]
    __shared__ uint2 s_x[TOKENS];                           // a float each
    __shared__ int sums[2][TOKENS][ROWS];                   // of two row groups in turn
    __shared__ u32 maxima[WARPS];
    __shared__ u64 arrived;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane / 4, part = lane % 4;
    const int stride = token_stride(K), groups = (N + ROWS - 1) / ROWS;
    const int first_token = blockIdx.x % CLUSTER;
    const u64 policy = evict_first();
#if CLUSTER > 1
    if (threadIdx.x == 0) expect_bytes(shared_address(&arrived), TOKENS * ((K + 7) / 8 * 8 + 8));
    __syncwarp();
    cluster_arrive();
#endif

    // x goes first: behind the weights' misses it would wait for them.
    uint4 token[VECTORS];
    auto load_token = [&](int m) {
UNROLL for (int i = 0; i < VECTORS; ++i) {
            const int k = (i * THREADS + threadIdx.x) * 8;
            token[i] = load_activations(x + (long long)m * K + k, K - k);
        }
    };
    if (first_token < TOKENS) load_token(first_token);
    __syncwarp();  // keeps the compiler from putting the weights first

    // A lane's loads of a round lie at offset(0) ... offset(DEPTH - 1); two in turn are a cache line of its row.
    uint4 ring[DEPTH][TILES];
    const signed char* rows[TILES];
    const int lane_k = warp * 128 + 16 * part;
    int load_group = blockIdx.x, left = K - lane_k;  // columns from the round's first on, none after the last group
    auto aim = [&] {
UNROLL for (int tile = 0; tile < TILES; ++tile)
            rows[tile] = w + (long long)min(load_group * ROWS + tile * 8 + row, N - 1) * K + lane_k;
    };
    auto load = [&](int d) {
UNROLL for (int tile = 0; tile < TILES; ++tile)
            ring[d][tile] = load_weights(rows[tile] + offset(d), left - offset(d), policy);
    };
    auto next_round = [&] {
        left -= ROUND;
UNROLL for (int tile = 0; tile < TILES; ++tile) rows[tile] += ROUND;
        if (left + lane_k <= 0) {
            load_group += gridDim.x;
            left = load_group < groups ? K - lane_k : 0;
            aim();
        }
    };
    aim();
UNROLL for (int d = 0; d < DEPTH; ++d) load(d);
    next_round();

    // The thread that finishes (token, row) of a group holds that row's scale ahead of time.
    const int my_token = threadIdx.x / ROWS, my_row = threadIdx.x % ROWS;
    const bool finisher = my_token < TOKENS;
    float scale = s_w[min((int)blockIdx.x * ROWS + my_row, N - 1)];
    for (int i = threadIdx.x; i < 2 * TOKENS * ROWS; i += THREADS) (&sums[0][0][0])[i] = 0;

#if CLUSTER > 1
    cluster_wait();  // all its programs have started
#endif
#pragma unroll 1
    for (int m = first_token; m < TOKENS; m += CLUSTER) {
        u32 largest = 0;  // without its sign, a half's size is the order of its bits
UNROLL for (int i = 0; i < VECTORS; ++i)
            largest = __vmaxu2(largest, __vmaxu2(__vmaxu2(token[i].x & 0x7FFF7FFF, token[i].y & 0x7FFF7FFF),
                                                 __vmaxu2(token[i].z & 0x7FFF7FFF, token[i].w & 0x7FFF7FFF)));
        largest = __reduce_max_sync(~0u, max(largest & 0xFFFF, largest >> 16));
        if (lane == 0) maxima[warp] = largest;
        __syncthreads();
        const float absmax = to_float<BF16>(__reduce_max_sync(~0u, lane < WARPS ? maxima[lane] : 0));
        const float inverse = absmax > 1e-30f ? __fdiv_rn(127.0f, absmax) : 0;
        if (threadIdx.x == 0) hand_out(&s_x[m], {__float_as_uint(__fdiv_rn(absmax, 127.0f)), 0}, &arrived);
UNROLL for (int i = 0; i < VECTORS; ++i) {
            const int k = (i * THREADS + threadIdx.x) * 8;
            const uint2 q = {__byte_perm(quantize(token[i].x, inverse), quantize(token[i].y, inverse), 0x5410),
                             __byte_perm(quantize(token[i].z, inverse), quantize(token[i].w, inverse), 0x5410)};
            if (k < K) hand_out(codes + m * stride + k, q, &arrived);
        }
        if (m + CLUSTER < TOKENS) {
            load_token(m + CLUSTER);
            __syncthreads();  // everybody has read the maxima
        }
    }
    __syncthreads();
#if CLUSTER > 1
    wait_for_bytes(shared_address(&arrived));
#endif

    int acc[TILES][4] = {}, buffer = 0;
#pragma unroll 1
    for (int group = blockIdx.x; group < groups; group += gridDim.x) {
#pragma unroll 1
        for (int k = warp * 128; k - warp * 128 < K; k += ROUND) {
UNROLL for (int d = 0; d < DEPTH; ++d) {
                if (k + offset(d) < K) {
                    uint4 a = {0, 0, 0, 0};
                    if (row < TOKENS)
                        a = *reinterpret_cast<const uint4*>(codes + row * stride + k + offset(d) + 16 * part);
UNROLL for (int tile = 0; tile < TILES; ++tile) {
                        mma_int8(acc[tile], a.x, a.y, ring[d][tile].x, ring[d][tile].y);
                        mma_int8(acc[tile], a.z, a.w, ring[d][tile].z, ring[d][tile].w);
                    }
                }
                load(d);
                __syncwarp();  // or the compiler would put off the loads of a whole round
            }
            next_round();
        }
        // The warps' sums meet: integers, so their order does not matter.
UNROLL for (int tile = 0; tile < TILES; ++tile) {
            if (row < TOKENS) {
                atomicAdd(&sums[buffer][row][tile * 8 + 2 * part], acc[tile][0]);
                atomicAdd(&sums[buffer][row][tile * 8 + 2 * part + 1], acc[tile][1]);
            }
            acc[tile][0] = acc[tile][1] = acc[tile][2] = acc[tile][3] = 0;
        }
        __syncthreads();
        if (finisher) {
            const int n = group * ROWS + my_row;
            const float value = (float)sums[buffer][my_token][my_row] * __uint_as_float(s_x[my_token].x) * scale;
            sums[buffer][my_token][my_row] = 0;  // used again after the next group's barrier
            if (n < N) y[(long long)my_token * N + n] = to_half<BF16>(value);
            scale = s_w[min((group + (int)gridDim.x) * ROWS + my_row, N - 1)];
        }
        buffer ^= 1;
    }
}
